"""What the screens draw, as Rich renderables that ask the console for its width."""
