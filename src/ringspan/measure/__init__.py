"""What happens: steps that run, are traced or rehearsed, and machines that are measured."""
