"""What is computed when, and what is sent to whom: routes, schedules, their events, times and memory."""
