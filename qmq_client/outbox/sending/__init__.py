"""Sending inside the application's transaction: which session, the INSERT, and what is noted of it."""
