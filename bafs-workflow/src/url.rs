//! Locations on a home: scheme, host and normalised path. It opens nothing.

use std::fmt;

use bafs_proto::path::{from_bytes, is_control_or_bidirectional};
use serde::{Deserialize, Serialize};

use super::limits::PATH_BYTES_MAX;

/// A location on a home. Two URLs that name the same place the same way are equal.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Url {
    /// How the place is reached.
    pub scheme: Scheme,
    /// The host in lower case, with `:PORT` when one is given; the bucket for `s3`; empty for
    /// `file`.
    pub host: String,
    /// The absolute path without `.`, `..`, doubled or trailing slashes; `/` is the whole host.
    pub path: String,
}

/// How a home is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Scheme {
    /// Our own home server.
    Bafs,
    /// The file transfer protocol.
    Ftp,
    /// A path of the machine that the home server runs on.
    File,
    /// The web, unencrypted; cannot be written to.
    Http,
    /// The web; cannot be written to.
    Https,
    /// An object store.
    S3,
    /// File transfer over SSH.
    Sftp,
    /// The file transfer protocol over TLS.
    Ftps,
}

/// Why a text is no URL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UrlError {
    /// What is wrong.
    pub message: String,
    /// What to write instead.
    pub hint: Option<String>,
}

const SCHEMES: [(&str, Scheme); 8] = [
    ("bafs", Scheme::Bafs),
    ("ftp", Scheme::Ftp),
    ("ftps", Scheme::Ftps),
    ("file", Scheme::File),
    ("http", Scheme::Http),
    ("https", Scheme::Https),
    ("s3", Scheme::S3),
    ("sftp", Scheme::Sftp),
];

impl Scheme {
    /// The name in front of `://`.
    pub fn name(self) -> &'static str {
        SCHEMES
            .iter()
            .find(|(_, scheme)| *scheme == self)
            .map_or("", |(name, _)| name)
    }

    /// Whether a home of this scheme takes files.
    pub fn is_writable(self) -> bool {
        !matches!(self, Self::Http | Self::Https)
    }
}

impl Url {
    /// The home as nodes know it that is no home server: address and path below it.
    ///
    /// # Errors
    /// What of the URL has no meaning there.
    pub fn foreign_location(&self) -> Result<(String, String), UrlError> {
        let address = format!("{}://{}", self.scheme.name(), self.host);
        let path = self.path.trim_start_matches('/');
        if !matches!(self.scheme, Scheme::Http | Scheme::Https) {
            return Ok((address, path.to_owned()));
        }
        if path.contains('?') {
            let hint = "name a file by its path alone";
            return Err(url_error(format!("{self} has a query"), hint));
        }
        let decoded = percent_decode(path).filter(|path| !path.split('/').any(|part| part == ".."));
        let wrong = || url_error(format!("{self} is wrongly encoded"), "write %25 for a %");
        Ok((address, decoded.ok_or_else(wrong)?))
    }
}

/// A path of the web without its `%` codes; `None` when one is wrong.
fn percent_decode(path: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(path.len());
    let mut rest = path.as_bytes();
    while let Some((&first, behind)) = rest.split_first() {
        if first != b'%' {
            bytes.push(first);
            rest = behind;
            continue;
        }
        let (code, behind) = behind.split_at_checked(2)?;
        bytes.push(u8::from_str_radix(std::str::from_utf8(code).ok()?, 16).ok()?);
        rest = behind;
    }
    Some(from_bytes(&bytes))
}

impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}{}", self.scheme.name(), self.host, self.path)
    }
}

impl fmt::Display for UrlError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        match &self.hint {
            Some(hint) => write!(f, " ({hint})"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for UrlError {}

impl std::str::FromStr for Url {
    type Err = UrlError;

    fn from_str(text: &str) -> Result<Self, UrlError> {
        let Some((scheme_name, rest)) = text.split_once("://") else {
            let hint = "write it as bafs://HOST/PATH or file:///PATH";
            return Err(url_error(format!("'{text}' is not a URL"), hint));
        };
        let known = SCHEMES
            .iter()
            .find(|(name, _)| name.eq_ignore_ascii_case(scheme_name));
        let Some(&(_, scheme)) = known else {
            let hint = "use bafs, ftp, file, http, https, s3 or sftp";
            return Err(url_error(
                format!("unknown scheme '{scheme_name}' in '{text}'"),
                hint,
            ));
        };
        if text.len() > PATH_BYTES_MAX || text.contains(is_control_or_bidirectional) {
            let hint =
                format!("at most {PATH_BYTES_MAX} bytes, no control or bidirectional characters");
            return Err(url_error(
                "this URL is too long or not printable".to_owned(),
                hint,
            ));
        }
        let (host, path) = match rest.find('/') {
            Some(slash) => rest.split_at(slash),
            None => (rest, "/"),
        };
        let host = parse_host(scheme, host)?;
        Ok(Self {
            scheme,
            host,
            path: parse_path(scheme, path)?,
        })
    }
}

fn parse_host(scheme: Scheme, text: &str) -> Result<String, UrlError> {
    if scheme == Scheme::File {
        return match text {
            "" => Ok(String::new()),
            _ => Err(url_error(
                format!("a file URL has no host, but this one has '{text}'"),
                format!("write file:///{text}/..."),
            )),
        };
    }
    if text.is_empty() {
        let hint = format!("write {}://HOST/PATH", scheme.name());
        return Err(url_error("this URL has no host".to_owned(), hint));
    }
    if text.contains('@') {
        let hint = "credentials belong to the home server's settings, not into a workflow";
        return Err(url_error(
            format!("the host '{text}' contains a user name"),
            hint,
        ));
    }
    let (name, port) = match text.rsplit_once(':') {
        Some((name, port)) if !port.ends_with(']') => (name, Some(port)),
        _ => (text, None),
    };
    let address = name
        .strip_prefix('[')
        .and_then(|rest| rest.strip_suffix(']'));
    let is_valid = match address {
        Some(address) => address.parse::<std::net::Ipv6Addr>().is_ok(),
        None => {
            let is_letter = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
            !name.is_empty() && name.chars().all(is_letter)
        }
    };
    if !is_valid {
        let hint = "a host is a name, an address, or an IPv6 address in [ ]";
        return Err(url_error(format!("'{name}' is not a host name"), hint));
    }
    let Some(port) = port else {
        return Ok(name.to_ascii_lowercase());
    };
    match port.parse::<u16>() {
        Ok(number) if number > 0 => Ok(format!("{}:{number}", name.to_ascii_lowercase())),
        _ => Err(url_error(
            format!("'{port}' is not a port"),
            "a port is a number from 1 to 65535",
        )),
    }
}

fn parse_path(scheme: Scheme, text: &str) -> Result<String, UrlError> {
    // What follows `?` on the web is no path and stays as it is.
    let query_start = match scheme {
        Scheme::Http | Scheme::Https => text.find('?').unwrap_or(text.len()),
        _ => text.len(),
    };
    let (path, query) = text.split_at(query_start);
    let mut normal = String::with_capacity(text.len());
    for part in path.split('/') {
        // Servers of the web decode %2e before they look for parents.
        let decoded = part.replace("%2e", ".").replace("%2E", ".");
        if decoded == ".." {
            return Err(url_error(
                format!("the path '{path}' contains '..'"),
                "write the path without it",
            ));
        }
        if !part.is_empty() && part != "." {
            normal.push('/');
            normal.push_str(part);
        }
    }
    if normal.is_empty() {
        normal.push('/');
    }
    normal.push_str(query);
    Ok(normal)
}

fn url_error(message: String, hint: impl Into<String>) -> UrlError {
    UrlError {
        message,
        hint: Some(hint.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_normalised() {
        for (text, normal) in [
            (
                "bafs://Home.Example:9000//a/./b/",
                "bafs://home.example:9000/a/b",
            ),
            ("ftp://home/mydata", "ftp://home/mydata"),
            ("FILE:///abs/x", "file:///abs/x"),
            ("file:///", "file:///"),
            ("bafs://home", "bafs://home/"),
            ("s3://bucket/key?x", "s3://bucket/key?x"),
            ("https://h/a//b?u=c//d/..", "https://h/a/b?u=c//d/.."),
            ("sftp://[::1]:022/x", "sftp://[::1]:22/x"),
            ("sftp://[::1]/x", "sftp://[::1]/x"),
        ] {
            let url: Url = text.parse().unwrap();
            assert_eq!(url.to_string(), normal);
            assert_eq!(normal.parse::<Url>().unwrap(), url);
        }
    }

    #[test]
    fn foreign_urls_split_into_host_and_path() {
        let place = |text: &str| text.parse::<Url>().unwrap().foreign_location();
        let is = |address: &str, path: &str| Ok((address.to_owned(), path.to_owned()));
        assert_eq!(place("s3://b/a%20b/c"), is("s3://b", "a%20b/c"));
        assert_eq!(place("sftp://h:22"), is("sftp://h:22", ""));
        assert_eq!(place("file:///a/b"), is("file://", "a/b"));
        assert_eq!(place("https://h/a%20b"), is("https://h", "a b"));
        for wrong in [
            "https://h/a?b",
            "https://h/%2",
            "https://h/%zz",
            "http://h/%2f..%2f",
        ] {
            assert!(place(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn invalid_urls_are_rejected() {
        for (text, expected) in [
            ("/data", "is not a URL"),
            ("gopher://h/x", "unknown scheme 'gopher'"),
            ("bafs:///x", "has no host"),
            ("file://h/x", "write file:///h/..."),
            ("ftp://me:secret@h/x", "contains a user name"),
            ("bafs://h/a/../b", "contains '..'"),
            ("https://h/a/%2e%2E/b", "contains '..'"),
            ("bafs://h:0/x", "is not a port"),
            ("bafs://h:port/x", "is not a port"),
            ("bafs://a b/x", "is not a host name"),
            ("bafs://[::g]/x", "is not a host name"),
            ("bafs://:80/x", "is not a host name"),
            ("bafs://h/\u{7}", "not printable"),
        ] {
            let message = text.parse::<Url>().unwrap_err().to_string();
            assert!(message.contains(expected), "{text}: {message}");
        }
    }
}
