"""The oldest and newest Python and libraries that the package accepts, and the tests for them."""
