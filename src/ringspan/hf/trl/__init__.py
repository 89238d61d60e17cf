"""TRL's trainers on a ring."""
