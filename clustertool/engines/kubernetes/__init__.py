"""The engine kubernetes: jobs are pods of an Indexed Job, a JobSet or a PaddleJob."""
