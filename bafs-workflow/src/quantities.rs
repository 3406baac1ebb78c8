//! Sizes and durations with units, exact to the byte and second: no floating point. It does not
//! know where in a file they stand.

use std::fmt;

use super::limits::{RUNTIME_S_MAX, SIZE_BYTES_MAX};

/// Decimals of a number that are looked at; more cannot matter below [`SIZE_BYTES_MAX`].
const DECIMALS_MAX: usize = 18;

const DECIMAL_UNITS: [(&str, u64); 6] = [
    ("B", 1),
    ("KB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("TB", 1_000_000_000_000),
    ("PB", 1_000_000_000_000_000),
];

const BINARY_UNITS: [(&str, u64); 5] = [
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
    ("PiB", 1 << 50),
];

const TIME_UNITS: [(&str, u64); 10] = [
    ("s", 1),
    ("sec", 1),
    ("second", 1),
    ("seconds", 1),
    ("min", 60),
    ("minutes", 60),
    ("h", 3_600),
    ("hours", 3_600),
    ("d", 86_400),
    ("days", 86_400),
];

/// Why a text is no size or duration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QuantityError {
    /// What is wrong.
    pub message: String,
    /// What to write instead.
    pub hint: Option<String>,
}

impl fmt::Display for QuantityError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        match &self.hint {
            Some(hint) => write!(f, " ({hint})"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for QuantityError {}

/// Reads a size such as `10MB`, `1.5 GiB` or `3500GB` to bytes. Zero is a size.
///
/// Decimal units (`B KB MB GB TB PB`, powers of 1000) may be written in any case, but for `Mb` and
/// the like, which are megabits elsewhere; binary ones (`KiB MiB GiB TiB PiB`, powers of 1024) only
/// so. A number alone is an error.
pub fn parse_size(text: &str) -> Result<u64, QuantityError> {
    let (number, unit) = split_unit(text, "a size such as 10 MB")?;
    if matches!(unit, "Kb" | "Mb" | "Gb" | "Tb" | "Pb") {
        return Err(bit_unit_error(number, unit));
    }
    if unit.is_empty() {
        let hint = format!("write '{number} MB', or '{number} B' if you mean bytes");
        return Err(quantity_error(
            format!("the size '{number}' has no unit"),
            hint,
        ));
    }
    let decimal = DECIMAL_UNITS
        .iter()
        .find(|(name, _)| name.eq_ignore_ascii_case(unit));
    let binary = BINARY_UNITS.iter().find(|(name, _)| *name == unit);
    let Some(&(_, unit_bytes)) = decimal.or(binary) else {
        return Err(unknown_unit_error(unit));
    };
    let bytes = scale_decimal(number, unit_bytes, "bytes")?;
    if bytes > SIZE_BYTES_MAX {
        return Err(quantity_error(
            format!("the size '{text}' is too large"),
            "the limit is 1000 PB",
        ));
    }
    Ok(bytes)
}

/// Reads a rate such as `1 MB/s` to bytes per second, with or without the `/s`. Links are sold by
/// bits, and a factor of eight is not noticed: a unit with a small `b` is an error, as is zero.
pub fn parse_rate(text: &str) -> Result<u64, QuantityError> {
    let text = text.trim();
    let size = text.strip_suffix("/s").unwrap_or(text);
    let (number, unit) = split_unit(size, "a rate such as 1 MB/s")?;
    if unit.ends_with('b') || unit.to_ascii_lowercase().contains("bit") {
        return Err(bit_unit_error(number, unit));
    }
    match parse_size(size)? {
        0 => Err(QuantityError {
            message: format!("the rate '{text}' is zero"),
            hint: None,
        }),
        rate => Ok(rate),
    }
}

/// Reads a duration such as `60 s`, `5min` or `1.5 h` to seconds; a number alone means seconds.
pub fn parse_duration(text: &str) -> Result<u64, QuantityError> {
    let (number, unit) = split_unit(text, "a duration such as 5 min")?;
    let known = TIME_UNITS
        .iter()
        .find(|(name, _)| name.eq_ignore_ascii_case(unit));
    let unit_s = match known {
        Some(&(_, unit_s)) => unit_s,
        None if unit.is_empty() => 1,
        None => {
            return Err(quantity_error(
                format!("unknown unit of time '{unit}'"),
                "use s, min, h or d",
            ));
        }
    };
    let seconds = scale_decimal(number, unit_s, "seconds")?;
    if seconds > RUNTIME_S_MAX {
        return Err(quantity_error(
            format!("the duration '{text}' is too long"),
            "the limit is ten years",
        ));
    }
    Ok(seconds)
}

/// The same where what is meant is easily ten times the seconds that a number alone stands for.
pub fn parse_duration_with_unit(text: &str) -> Result<u64, QuantityError> {
    let (_, unit) = split_unit(text, "a duration such as 12 h")?;
    if unit.is_empty() {
        return Err(quantity_error(
            format!("the duration '{text}' has no unit"),
            "write it with s, min, h or d, such as 12 h",
        ));
    }
    parse_duration(text)
}

fn split_unit<'t>(text: &'t str, expected: &str) -> Result<(&'t str, &'t str), QuantityError> {
    let text = text.trim();
    let end = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (number, unit) = (&text[..end], text[end..].trim_start());
    if unit.starts_with([',', '_']) {
        let hint = "write digits without separators, and a point before decimals";
        return Err(quantity_error(
            format!("'{text}' is not a valid number"),
            hint,
        ));
    }
    if !number.starts_with(|c: char| c.is_ascii_digit()) {
        return Err(QuantityError {
            message: format!("expected {expected}, not '{text}'"),
            hint: None,
        });
    }
    Ok((number, unit))
}

/// What looks like bits.
fn bit_unit_error(number: &str, unit: &str) -> QuantityError {
    let prefix = unit.chars().next().map(|first| first.to_ascii_uppercase());
    let prefix = prefix.filter(|first| "KMGTP".contains(*first));
    let letter = prefix.map(String::from).unwrap_or_default();
    let hint = format!(
        "write bytes: '{number} {letter}B' if you mean those, an eighth of it if you mean bits"
    );
    quantity_error(format!("'{number} {unit}' may be bits"), hint)
}

fn unknown_unit_error(unit: &str) -> QuantityError {
    let binary = BINARY_UNITS
        .iter()
        .find(|(name, _)| name.eq_ignore_ascii_case(unit));
    let letter = unit.to_ascii_uppercase();
    let hint = match binary {
        Some((name, _)) => format!("write '{name}'"),
        None if matches!(letter.as_str(), "K" | "M" | "G" | "T" | "P") => {
            format!("write '{letter}B' (powers of 1000) or '{letter}iB' (powers of 1024)")
        }
        None => "use B, KB, MB, GB, TB, PB or KiB, MiB, GiB, TiB, PiB".to_owned(),
    };
    quantity_error(format!("unknown unit of size '{unit}'"), hint)
}

/// The exact product of a decimal number and a whole unit.
fn scale_decimal(number: &str, unit: u64, what: &str) -> Result<u64, QuantityError> {
    let malformed = || QuantityError {
        message: format!("'{number}' is not a number"),
        hint: None,
    };
    let too_large = || QuantityError {
        message: format!("'{number}' is too large"),
        hint: None,
    };
    let (whole, decimals) = match number.split_once('.') {
        Some((_, "")) => return Err(malformed()),
        Some((whole, decimals)) => (whole, decimals.trim_end_matches('0')),
        None => (number, ""),
    };
    if decimals.contains('.') {
        return Err(malformed());
    }
    let uneven = || QuantityError {
        message: format!("'{number}' of this unit is not a whole number of {what}"),
        hint: None,
    };
    if decimals.len() > DECIMALS_MAX {
        return Err(uneven());
    }
    let whole: u64 = whole.parse().map_err(|_| too_large())?;
    let fraction: u64 = if decimals.is_empty() {
        0
    } else {
        decimals.parse().map_err(|_| uneven())?
    };
    // No overflow: whole < 2^64, fraction < 10^18 < 2^60 and unit <= 2^50.
    let fraction = u128::from(fraction) * u128::from(unit);
    let divisor = 10u128.pow(decimals.len() as u32);
    if !fraction.is_multiple_of(divisor) {
        return Err(uneven());
    }
    let product = u128::from(whole) * u128::from(unit) + fraction / divisor;
    u64::try_from(product).map_err(|_| too_large())
}

fn quantity_error(message: String, hint: impl Into<String>) -> QuantityError {
    QuantityError {
        message,
        hint: Some(hint.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_exact() {
        for (text, bytes) in [
            ("10MB", 10_000_000),
            ("10 mb", 10_000_000),
            ("1 GB", 1_000_000_000),
            ("1.5 GB", 1_500_000_000),
            ("1.5 GiB", 1_610_612_736),
            ("3.5TB", 3_500_000_000_000),
            ("3500GB", 3_500_000_000_000),
            ("0.1 KB", 100),
            ("0.001KB", 1),
            ("2.50 kB", 2_500),
            ("8.675309 PB", 8_675_309_000_000_000),
            ("999.999999999999999 PB", 999_999_999_999_999_999),
            ("0.5 KiB", 512),
            ("7 B", 7),
            ("0 B", 0),
            ("1000 PB", SIZE_BYTES_MAX),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn size_errors_suggest_a_valid_form() {
        for (text, expected) in [
            (
                "50",
                "has no unit (write '50 MB', or '50 B' if you mean bytes)",
            ),
            (
                "5 G",
                "unknown unit of size 'G' (write 'GB' (powers of 1000)",
            ),
            ("5 gib", "(write 'GiB')"),
            ("5 blocks", "unknown unit of size 'blocks' (use B, KB"),
            ("1,5 GB", "a point before decimals"),
            ("-5 MB", "expected a size such as 10 MB, not '-5 MB'"),
            ("", "expected a size"),
            (".5 MB", "expected a size"),
            ("5. MB", "is not a number"),
            ("1.2.3 MB", "is not a number"),
            ("0.5 B", "not a whole number of bytes"),
            ("0.0000000000000000001 PB", "not a whole number of bytes"),
            ("1001 PB", "too large (the limit is 1000 PB)"),
            (
                "80 Mb",
                "'80 Mb' may be bits (write bytes: '80 MB' if you mean those, an eighth",
            ),
            ("1Kb", "(write bytes: '1 KB'"),
            ("99999999999999999999999 B", "too large"),
            ("18446744073709551615 PB", "too large"),
        ] {
            let message = parse_size(text).unwrap_err().to_string();
            assert!(message.contains(expected), "{text}: {message}");
        }
    }

    #[test]
    fn rates_accept_bytes_and_reject_bits() {
        for (text, rate) in [
            ("1 MB/s", 1_000_000),
            ("1.5 KiB/s", 1_536),
            (" 2gB", 2_000_000_000),
        ] {
            assert_eq!(parse_rate(text), Ok(rate), "{text}");
        }
        for (text, expected) in [
            ("1 Mb/s", "'1 Mb' may be bits (write bytes: '1 MB'"),
            ("1 mb/s", "'1 mb' may be bits"),
            ("9 kb", "may be bits (write bytes: '9 KB'"),
            ("8 b/s", "may be bits (write bytes: '8 B'"),
            ("1 Gbit/s", "may be bits (write bytes: '1 GB'"),
            ("1 µb/s", "'1 µb' may be bits (write bytes: '1 B'"),
            ("1 Мbit/s", "may be bits"),
            ("0 MB/s", "the rate '0 MB/s' is zero"),
            ("fast", "expected a rate such as 1 MB/s, not 'fast'"),
            ("12/s", "has no unit"),
        ] {
            let message = parse_rate(text).unwrap_err().to_string();
            assert!(message.contains(expected), "{text}: {message}");
        }
    }

    #[test]
    fn durations_are_parsed_in_whole_seconds() {
        for (text, seconds) in [
            ("60 s", 60),
            ("5 min", 300),
            ("2 h", 7_200),
            ("1.5h", 5_400),
            ("90", 90),
            ("1 d", 86_400),
        ] {
            assert_eq!(parse_duration(text), Ok(seconds), "{text}");
        }
        for text in ["", "soon", "5 weeks", "0.5 s", "11000 d"] {
            assert!(parse_duration(text).is_err(), "{text}");
        }
    }
}
