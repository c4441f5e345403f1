"""Elastic jobs of the ssh engine: each node joins the job by itself, and is started again when it comes back."""
