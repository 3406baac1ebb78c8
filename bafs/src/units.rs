//! Rates and sizes on the command line, such as `1MB/s`.

use anyhow::{Context, Result};
use bafs_workflow::parse_size;

use crate::args::UsageError;

/// Bytes per second from text such as `1MB/s`, `12 MiB/s` or `500KB`; not from bits.
pub(crate) fn parse_rate(text: &str) -> Result<u64> {
    bafs_workflow::parse_rate(text)
        .map_err(|e| UsageError::from_reason(format!("'{text}' is not a rate such as 1MB/s: {e}")))
}

/// The rate that a server keeps to, from its argument.
pub(crate) fn parse_rate_limit(text: Option<&str>) -> Result<Option<u64>> {
    let rate = text.map(|text| match parse_rate(text) {
        // A limit might be of bytes in all as well.
        Ok(_) if !text.trim_end().ends_with("/s") => Err(UsageError::from_reason(format!(
            "'{text}' is not a rate; write {}/s",
            text.trim()
        ))),
        rate => rate,
    });
    let rate = rate.transpose();
    rate.context("--rate-limit (leave it out for no limit)")
}

/// Bytes from text such as `10GB`.
pub(crate) fn parse_bytes(text: &str) -> Result<u64> {
    parse_size(text.trim())
        .map_err(|e| UsageError::from_reason(format!("'{text}' is not a size: {e}")))
}

/// Bytes for people, to three decimals of the unit; the exact number is in the JSON.
pub(crate) fn format_bytes(bytes: u128) -> String {
    const UNITS: [(&str, u128); 5] = [
        ("PB", 1_000_000_000_000_000),
        ("TB", 1_000_000_000_000),
        ("GB", 1_000_000_000),
        ("MB", 1_000_000),
        ("KB", 1_000),
    ];
    match UNITS.into_iter().find(|&(_, unit)| bytes >= unit) {
        Some((name, unit)) => format!("{:.3} {name}", bytes as f64 / unit as f64),
        None => format!("{bytes} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zero_rate_error_names_its_argument() {
        let said = format!("{:#}", parse_rate("0MB/s").unwrap_err());
        assert!(
            said.contains("is zero") && !said.contains("--rate-limit"),
            "{said}"
        );
        let said = format!("{:#}", parse_rate_limit(Some("0MB/s")).unwrap_err());
        assert!(said.contains("--rate-limit (leave it out"), "{said}");
        assert_eq!(parse_rate_limit(None).unwrap(), None);
    }

    #[test]
    fn limit_requires_a_rate_per_second() {
        assert_eq!(parse_rate_limit(Some("5 MB/s")).unwrap(), Some(5_000_000));
        let said = format!("{:#}", parse_rate_limit(Some("5MB")).unwrap_err());
        assert!(said.contains("write 5MB/s"), "{said}");
    }

    #[test]
    fn sizes_are_shown_in_readable_units() {
        for (bytes, text) in [
            (0, "0 B"),
            (999, "999 B"),
            (1_025_000_000_000, "1.025 TB"),
            (500_000_000, "500.000 MB"),
        ] {
            assert_eq!(format_bytes(bytes), text);
        }
    }
}
