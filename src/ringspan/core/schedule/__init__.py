"""Routes, schedules, their events, times and memory."""
