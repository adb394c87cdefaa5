"""How good a model's answers are, by backend: over the engine's public interface alone."""
