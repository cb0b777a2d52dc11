"""What a plan is, and the methods that make them; docs/writing-a-method.md adds one."""
