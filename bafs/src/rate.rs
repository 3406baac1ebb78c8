//! Rates on the command line, such as `1MB/s`.

use anyhow::{Context, Result, bail};
use bafs_sched::workflow::parse_size;

/// Bytes per second from text such as `1MB/s`, `12 MiB/s` or `500KB`.
pub(crate) fn parse_rate(text: &str) -> Result<u64> {
    let size = text.trim().strip_suffix("/s").unwrap_or(text);
    let rate = parse_bytes(size).with_context(|| format!("'{text}' is no rate such as 1MB/s"))?;
    if rate == 0 {
        bail!("a rate of 0 would stop everything; leave --limit out for no limit");
    }
    Ok(rate)
}

/// Bytes from text such as `10GB`.
pub(crate) fn parse_bytes(text: &str) -> Result<u64> {
    parse_size(text.trim()).map_err(|e| anyhow::anyhow!("'{text}' is no size: {e}"))
}
