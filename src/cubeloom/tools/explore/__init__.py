"""`cubeloom explore`: plans, schedules, layouts and runs on one local page."""
