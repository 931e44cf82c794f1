"""What each choice costs, in µs and bytes."""
