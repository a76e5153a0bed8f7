"""The repository's own suite: pytester for the plugin's tests. The plugin itself comes by its entry point."""

pytest_plugins = ["pytester"]
