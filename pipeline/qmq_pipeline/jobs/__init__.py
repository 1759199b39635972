"""Jobs of the pipeline: functions of a session and a `PipelineConfig`."""
