//! What FTP servers say of files, in the forms of RFC 3659 and of `ls -l`; and of ports. Asks
//! nobody.

/// A file or directory as a server describes it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct FileFacts {
    pub(super) kind: FtpFileKind,
    pub(super) size: u64,
    pub(super) mtime_ns: i64,
}

/// What it is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum FtpFileKind {
    File,
    Directory,
    /// The directory that was listed, or the one above it.
    SelfOrParent,
    /// A FIFO, a socket or a device.
    Special,
    /// A link or something else: to be looked at.
    #[default]
    Unknown,
}

/// `type=file;size=3;modify=20260102030405; name`, with the name.
pub(super) fn parse_facts(line: &str) -> Option<(FileFacts, &str)> {
    let (facts, name) = line.trim_start().split_once(' ')?;
    let mut found = FileFacts::default();
    for fact in facts.split(';').filter(|fact| !fact.is_empty()) {
        let (key, value) = fact.split_once('=')?;
        match key.to_ascii_lowercase().as_str() {
            "type" => {
                found.kind = match value.to_ascii_lowercase().as_str() {
                    "file" => FtpFileKind::File,
                    "dir" => FtpFileKind::Directory,
                    "cdir" | "pdir" => FtpFileKind::SelfOrParent,
                    _ => FtpFileKind::Unknown,
                }
            }
            "size" => found.size = value.parse().ok()?,
            "modify" => found.mtime_ns = parse_time(value)?,
            _ => {}
        }
    }
    Some((found, name))
}

/// Kind and name of a line of `ls -l`; `None` for the line with the total.
pub(super) fn parse_long(line: &str) -> Option<(FtpFileKind, &str)> {
    let kind = match line.as_bytes().first()? {
        b'-' => FtpFileKind::File,
        b'd' => FtpFileKind::Directory,
        b'l' => FtpFileKind::Unknown,
        b'p' | b's' | b'b' | b'c' => FtpFileKind::Special,
        _ => return None,
    };
    let mut rest = line;
    for _ in 0..8 {
        let end = rest.find(' ')?;
        rest = rest[end..].trim_start_matches(' ');
    }
    // More than one space before a name is the name's own, but nobody could tell.
    if kind == FtpFileKind::Unknown {
        rest = rest.split_once(" -> ").map_or(rest, |(name, _)| name);
    }
    match rest {
        "" => None,
        "." | ".." => Some((FtpFileKind::SelfOrParent, rest)),
        name => Some((kind, name)),
    }
}

/// `YYYYMMDDHHMMSS`, with or without a fraction, in nanoseconds since the Unix epoch.
pub(super) fn parse_time(text: &str) -> Option<i64> {
    let text = text.trim();
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    if whole.len() != 14 || !whole.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let part = |from: usize, to: usize| whole[from..to].parse::<i64>().ok();
    let (year, month, day) = (part(0, 4)?, part(4, 6)?, part(6, 8)?);
    let clock = part(8, 10)? * 3600 + part(10, 12)? * 60 + part(12, 14)?;
    // Years begin in March here, so that the leap day is the last.
    let years = if month <= 2 { year - 1 } else { year };
    let days_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    let leap_days = years / 4 - years / 100 + years / 400;
    // 719,468 days lie between the first of March of the year 0 and the epoch.
    let days = years * 365 + leap_days + days_of_year - 719_468;
    let mut digits = fraction.chars().take(9).collect::<String>();
    while digits.len() < 9 {
        digits.push('0');
    }
    let nanoseconds = digits.parse::<i64>().ok()?;
    (days * 86_400 + clock)
        .checked_mul(1_000_000_000)?
        .checked_add(nanoseconds)
}

/// The port in `Entering Extended Passive Mode (|||6446|)`.
pub(super) fn parse_extended_port(text: &str) -> Option<u16> {
    let inside = text.split_once('(')?.1;
    let mut parts = inside.split(inside.chars().next()?);
    parts.nth(3)?.parse().ok()
}

/// The port in `Entering Passive Mode (127,0,0,1,25,46)`.
pub(super) fn parse_passive_port(text: &str) -> Option<u16> {
    let start = text.find(|c: char| c.is_ascii_digit())?;
    let is_part = |c: char| c.is_ascii_digit() || c == ',';
    let numbers = text[start..].split(|c| !is_part(c)).next()?;
    let mut numbers = numbers.split(',').skip(4).map(str::parse::<u8>);
    let (high, low) = (numbers.next()?.ok()?, numbers.next()?.ok()?);
    Some(u16::from_be_bytes([high, low]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_seconds_since_the_epoch() {
        let seconds = |text| parse_time(text).map(|ns| ns / 1_000_000_000);
        assert_eq!(seconds("19700101000000"), Some(0));
        assert_eq!(seconds("20000229120000"), Some(951_825_600));
        assert_eq!(seconds("20261121180000.250"), Some(1_795_284_000));
        assert_eq!(parse_time("19700101000000.25"), Some(250_000_000));
        for wrong in ["", "2026", "2026112118000x", "20261121180000.x"] {
            assert_eq!(parse_time(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn both_listing_formats_are_parsed() {
        let line = "Type=file;Size=12;Modify=19700101000001;Perm=r; a b";
        let file = FileFacts {
            kind: FtpFileKind::File,
            size: 12,
            mtime_ns: 1_000_000_000,
        };
        assert_eq!(parse_facts(line), Some((file, "a b")));
        assert_eq!(
            parse_facts("type=cdir; .").map(|(f, _)| f.kind),
            Some(FtpFileKind::SelfOrParent)
        );
        assert_eq!(parse_facts("nothing"), None);
        let long = "-rw-r--r--    1 0        0              12 Nov 21 18:00 a b";
        assert_eq!(parse_long(long), Some((FtpFileKind::File, "a b")));
        let link = "lrwxrwxrwx    1 0        0              12 Nov 21  2025 l -> a";
        assert_eq!(parse_long(link), Some((FtpFileKind::Unknown, "l")));
        let fifo = "prw-r--r--    1 0        0               0 Nov 21 18:00 p";
        assert_eq!(parse_long(fifo), Some((FtpFileKind::Special, "p")));
        assert_eq!(parse_long("total 8"), None);
        let own = "drwxr-xr-x    2 0        0            4096 Nov 21 18:00 .";
        assert_eq!(parse_long(own), Some((FtpFileKind::SelfOrParent, ".")));
    }

    #[test]
    fn passive_mode_ports_are_parsed() {
        assert_eq!(
            parse_extended_port("Entering Extended Passive Mode (|||6446|)."),
            Some(6446)
        );
        assert_eq!(
            parse_passive_port("Entering Passive Mode (127,0,0,1,25,46)."),
            Some(6446)
        );
        assert_eq!(parse_extended_port("no"), None);
        assert_eq!(parse_passive_port("Entering (1,2,3)"), None);
    }
}
