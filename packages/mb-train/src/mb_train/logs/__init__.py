"""What a run says of itself: lines, `log.jsonl`, boards, timers."""
