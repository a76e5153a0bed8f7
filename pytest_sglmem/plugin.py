"""The pytest surface: options, markers, fixtures, summary."""
