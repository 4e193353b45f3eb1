"""Starts, watches and stops the processes of one system, and lets none of them outlive it."""
