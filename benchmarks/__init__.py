"""Side-by-side measurements. Never tests: a number is stated with the run that it came from."""
