"""Brings the agent to hosts: builds its one file, looks at the host, uploads, and hands over to the host's own part.

What happens on the host after the upload is the agent's verb ``install`` (`remote_agent.verbs.install`).
"""
