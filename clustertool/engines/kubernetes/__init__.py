"""The engine kubernetes runs jobs as pods of an Indexed Job, a JobSet or a PaddleJob."""
