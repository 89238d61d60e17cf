"""What a machine or cluster can do."""
