//! ClassAds, the records of HTCondor: finds attributes that are literal strings, whatever else an
//! ad holds, and writes flat ads. Evaluates no expressions.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use bafs_proto::path::from_bytes;

/// Attributes whose value is a string, by name in small letters.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ClassAd {
    strings: BTreeMap<String, String>,
}

/// A value that a plug-in reports.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum AdValue {
    Text(String),
    Integer(i64),
    Real(f64),
    Boolean(bool),
}

impl ClassAd {
    /// The string of an attribute; names ignore upper and lower case.
    pub(crate) fn text(&self, name: &str) -> Option<&str> {
        self.strings
            .get(&name.to_ascii_lowercase())
            .map(String::as_str)
    }

    /// Reads ads in brackets (`[ A = 1; B = "x" ]`), one after the other.
    pub(crate) fn parse_all(text: &str) -> Result<Vec<Self>, String> {
        let mut reader = AdReader { text, at: 0 };
        let mut ads = Vec::new();
        loop {
            reader.skip_blanks()?;
            match reader.peek() {
                None => return Ok(ads),
                Some('[') => ads.push(reader.read_ad()?),
                // Lists of ads are between braces, with commas.
                Some('{' | '}' | ',') => reader.at += 1,
                Some(c) => return Err(format!("'{c}' instead of '[' at byte {}", reader.at)),
            }
        }
    }

    /// Reads an ad of the old form, an attribute a line. Lines of another form do not count.
    pub(crate) fn parse_lines(text: &str) -> Self {
        let mut ad = Self::default();
        for line in text.lines() {
            if let Some((name, value)) = line.split_once('=') {
                let mut reader = AdReader { text: value, at: 0 };
                if let Ok(Some(value)) = reader.read_expression() {
                    ad.strings.insert(name.trim().to_ascii_lowercase(), value);
                }
            }
        }
        ad
    }
}

struct AdReader<'t> {
    text: &'t str,
    at: usize,
}

impl AdReader<'_> {
    fn rest(&self) -> &str {
        &self.text[self.at..]
    }

    fn peek(&self) -> Option<char> {
        self.rest().chars().next()
    }

    fn next(&mut self) -> Option<char> {
        let c = self.peek()?;
        self.at += c.len_utf8();
        Some(c)
    }

    /// Skips blanks and comments.
    fn skip_blanks(&mut self) -> Result<(), String> {
        loop {
            let blanks = self.rest().len() - self.rest().trim_start().len();
            self.at += blanks;
            if self.rest().starts_with("//") {
                self.at += self.rest().find('\n').unwrap_or_else(|| self.rest().len());
            } else if self.rest().starts_with("/*") {
                let end = self.rest().find("*/").ok_or("a comment never ends")?;
                self.at += end + 2;
            } else {
                return Ok(());
            }
        }
    }

    fn read_ad(&mut self) -> Result<ClassAd, String> {
        self.at += 1;
        let mut ad = ClassAd::default();
        loop {
            self.skip_blanks()?;
            match self.peek() {
                Some(']') => {
                    self.at += 1;
                    return Ok(ad);
                }
                Some(';') => {
                    self.at += 1;
                    continue;
                }
                None => return Err("an ad never ends".to_owned()),
                Some(_) => {}
            }
            let name = self.read_name()?;
            self.skip_blanks()?;
            if self.next() != Some('=') {
                return Err(format!("'=' is missing after '{name}'"));
            }
            if let Some(value) = self.read_expression()? {
                ad.strings.insert(name.to_ascii_lowercase(), value);
            }
        }
    }

    fn read_name(&mut self) -> Result<String, String> {
        if self.peek() == Some('\'') {
            return self.read_quoted();
        }
        let is_part = |c: char| c.is_alphanumeric() || c == '_' || c == '.';
        let end = self
            .rest()
            .find(|c| !is_part(c))
            .unwrap_or_else(|| self.rest().len());
        if end == 0 {
            return Err(format!("no attribute name at byte {}", self.at));
        }
        let name = self.rest()[..end].to_owned();
        self.at += end;
        Ok(name)
    }

    /// Reads an expression up to `;` or the end of its ad; its value, if that is a literal string.
    fn read_expression(&mut self) -> Result<Option<String>, String> {
        let (mut depth, mut parts, mut literal) = (0_usize, 0, None);
        loop {
            self.skip_blanks()?;
            let Some(c) = self.peek() else { break };
            match c {
                ';' | ']' if depth == 0 => break,
                '"' | '\'' => {
                    let text = self.read_quoted()?;
                    literal = Some(text).filter(|_| c == '"');
                }
                c => {
                    depth = match c {
                        '[' | '(' | '{' => depth + 1,
                        ']' | ')' | '}' => depth.checked_sub(1).ok_or("unpaired brackets")?,
                        _ => depth,
                    };
                    self.next();
                    literal = None;
                    parts += 1;
                }
            }
            parts += 1;
        }
        if depth > 0 {
            return Err("unpaired brackets".to_owned());
        }
        Ok(literal.filter(|_| parts == 1))
    }

    /// Reads a string or a quoted name, with its escapes.
    fn read_quoted(&mut self) -> Result<String, String> {
        let quote = self.next();
        // Letters beyond ASCII are written as the octal codes of their bytes.
        let mut bytes = Vec::new();
        loop {
            match self.next() {
                None => return Err("a string never ends".to_owned()),
                Some('\\') => self.read_escape(&mut bytes)?,
                c if c == quote => return Ok(from_bytes(&bytes)),
                Some(c) => push_char(&mut bytes, c),
            }
        }
    }

    fn read_escape(&mut self, bytes: &mut Vec<u8>) -> Result<(), String> {
        let c = self.next().ok_or("a string never ends")?;
        match c {
            'b' => bytes.push(8),
            't' => bytes.push(b'\t'),
            'n' => bytes.push(b'\n'),
            'f' => bytes.push(12),
            'r' => bytes.push(b'\r'),
            '0'..='7' => {
                // Three digits if the first is at most 3, else two.
                let digits_max = if c <= '3' { 3 } else { 2 };
                let mut digits = String::from(c);
                while digits.len() < digits_max && self.peek().is_some_and(|c| c.is_digit(8)) {
                    digits.extend(self.next());
                }
                bytes.push(u8::from_str_radix(&digits, 8).unwrap_or(0));
            }
            other => push_char(bytes, other),
        }
        Ok(())
    }
}

fn push_char(bytes: &mut Vec<u8>, c: char) {
    bytes.extend(c.encode_utf8(&mut [0; 4]).as_bytes());
}

/// Writes an ad in brackets, and a line end.
pub(crate) fn format_ad(attributes: &[(&str, AdValue)]) -> String {
    let mut text = String::from("[ ");
    for (name, value) in attributes {
        let _ = write!(text, "{name} = {}; ", format_value(value));
    }
    text.push_str("]\n");
    text
}

/// Writes an ad in the old form, an attribute a line.
pub(crate) fn format_lines(attributes: &[(&str, AdValue)]) -> String {
    let lines = attributes.iter();
    lines
        .map(|(name, value)| format!("{name} = {}\n", format_value(value)))
        .collect()
}

fn format_value(value: &AdValue) -> String {
    match value {
        AdValue::Text(text) => {
            let mut quoted = String::from("\"");
            for c in text.chars() {
                match c {
                    '"' | '\\' => quoted.extend(['\\', c]),
                    '\n' => quoted.push_str("\\n"),
                    '\t' => quoted.push_str("\\t"),
                    c if c.is_control() => quoted.push(' '),
                    c => quoted.push(c),
                }
            }
            quoted.push('"');
            quoted
        }
        AdValue::Integer(number) => number.to_string(),
        AdValue::Real(number) => format!("{number:?}"),
        AdValue::Boolean(is_true) => is_true.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_are_found_among_expressions() {
        let text = "[ Nested = [ Url = \"no\"; x = {1, \"]\"} ]; // ; ]\n \
                    Test = ifThenElse(a =?= \"b;\", 'odd name', 3) /* ] */;\n \
                    url = \"bafs://home/a\\\"b\\\\c\\101\\303\\274\\n\"; Sum = \"a\" + \"b\"; \
                    'LocalFileName' = \"/x/y\" ]\n[Url=\"two\"][]";
        let ads = ClassAd::parse_all(text).expect("ads");
        assert_eq!(ads.len(), 3);
        assert_eq!(ads[0].text("URL"), Some("bafs://home/a\"b\\cAü\n"));
        assert_eq!(ads[0].text("localfilename"), Some("/x/y"));
        assert_eq!((ads[0].text("Test"), ads[0].text("Sum")), (None, None));
        assert_eq!(
            (ads[1].text("Url"), ads[2].text("Url")),
            (Some("two"), None)
        );
    }

    #[test]
    fn malformed_ads_are_refused() {
        for text in [
            "[ a = 1",
            "[ a 1 ]",
            "[ a = \"x ]",
            "x",
            "[ a = (1 ]",
            "[ = 2 ]",
            "[ /* ]",
        ] {
            assert!(ClassAd::parse_all(text).is_err(), "{text}");
        }
    }

    #[test]
    fn old_ads_have_an_attribute_a_line() {
        let ad = ClassAd::parse_lines("BafsCatalog = \"head:7000\"\nRank = 1 + 2\nnonsense\n");
        assert_eq!(ad.text("bafscatalog"), Some("head:7000"));
        assert_eq!(ad.text("Rank"), None);
    }

    #[test]
    fn written_ads_are_read_back() {
        let said = "a \"b\"\n\\ ü";
        let text = format_ad(&[("TransferError", AdValue::Text(said.to_owned()))]);
        let ads = ClassAd::parse_all(&text).expect("an ad");
        assert_eq!(ads[0].text("TransferError"), Some(said));
    }
}
