"""The offline phase on recorded checkpoints: replay them through policies, and compare the results.

``recorded.py`` reads the checkpoints, ``policy_replay.py`` saves them again under each policy, and
``quality.py`` trains on from what the policies restore.
"""
