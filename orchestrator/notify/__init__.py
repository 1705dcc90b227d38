"""Notifications: what a person waits for, sent to a command, a webhook or a notifier URL."""
