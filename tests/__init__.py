"""Tests of deltacheck. Each folder mirrors the package of the same name; ``support`` holds helpers,
``suites`` the long campaigns.
"""
