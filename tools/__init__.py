"""What developers of this project run; not installed."""
