//! `homes.toml`: what a node knows of homes that ask for a name, a key or a place. Connects to
//! nothing. Credentials are never shown.

use std::fmt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use bafs_proto::{Error, ErrorCode, Result};
use serde::Deserialize;

/// All that a node is told of homes.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HomeSettings {
    #[serde(default, rename = "home")]
    homes: Vec<HomeSetting>,
}

/// One home; which fields it needs depends on its kind.
#[derive(Clone, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct HomeSetting {
    /// Scheme and host; for `file` the directory that may be used.
    pub(super) url: String,
    /// Name to log in with.
    pub(super) user: Option<String>,
    /// Password that belongs to it (ftp, ftps, http).
    pub(super) password: Option<String>,
    /// Bearer token (http).
    pub(super) token: Option<String>,
    /// File with the private key (sftp); those that `ssh` finds when not given.
    pub(super) key: Option<PathBuf>,
    /// File with the keys of hosts (sftp); those that `ssh` finds when not given.
    pub(super) known_hosts: Option<PathBuf>,
    /// PEM file with the authorities that certify the server (ftps); those of the system when not
    /// given.
    pub(super) authorities: Option<PathBuf>,
    /// Server of the bucket (s3); that of AWS when not given.
    pub(super) endpoint: Option<String>,
    /// Region of the bucket (s3).
    pub(super) region: Option<String>,
    /// Access key (s3); anonymous when there is none.
    pub(super) access_key_id: Option<String>,
    /// Secret that belongs to it (s3).
    pub(super) secret_access_key: Option<String>,
}

impl fmt::Debug for HomeSetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HomeSetting({})", self.url)
    }
}

impl HomeSettings {
    /// Reads a file that nobody else may read.
    ///
    /// # Errors
    /// `NotFound`, `RightMissing` when others may read it, `Malformed`.
    pub fn load(path: &Path) -> Result<Self> {
        let fail = |code, why: &dyn fmt::Display| {
            Error::new(code, format!("settings of homes {}: {why}", path.display()))
        };
        let found = std::fs::metadata(path).map_err(|e| fail(ErrorCode::NotFound, &e))?;
        if found.permissions().mode() & 0o077 != 0 {
            let why = "it may hold secrets, but other users can read it; run `chmod 600` on it";
            return Err(fail(ErrorCode::RightMissing, &why));
        }
        let text = std::fs::read_to_string(path).map_err(|e| fail(ErrorCode::NotFound, &e))?;
        Self::parse(&text).map_err(|why| fail(ErrorCode::Malformed, &why))
    }

    fn parse(text: &str) -> Result<Self, String> {
        // The library's own text would show the line, and with it a secret.
        let settings: Self = toml::from_str(text).map_err(|error| {
            let line = error.span().map_or(0, |span| {
                let before = text.get(..span.start).unwrap_or_default();
                before.matches('\n').count() + 1
            });
            format!("line {line}: {}", error.message())
        })?;
        for home in &settings.homes {
            home.check()?;
        }
        Ok(settings)
    }

    /// What is known of the home at an address.
    pub(super) fn for_address(&self, address: &str) -> Option<&HomeSetting> {
        self.homes
            .iter()
            .find(|home| home.url.trim_end_matches('/') == address)
    }

    /// What is known of the home at an address that cannot be reached without.
    ///
    /// # Errors
    /// `RightMissing` when nothing is; it names the `fields` that are needed.
    pub(super) fn required_for(&self, address: &str, fields: &str) -> Result<&HomeSetting> {
        self.for_address(address).ok_or_else(|| {
            let text = format!(
                "no credentials for {address} on this node: add [[home]] with its url, {fields} to \
                 the file of `bafs node --homes FILE`"
            );
            Error::new(ErrorCode::RightMissing, text)
        })
    }

    /// The directories that file homes may use.
    pub(super) fn directories(&self) -> impl Iterator<Item = &Path> {
        let paths = self.homes.iter();
        paths.filter_map(|home| home.url.strip_prefix("file://").map(Path::new))
    }
}

impl HomeSetting {
    fn check(&self) -> Result<(), String> {
        let bad = |why: &str| Err(format!("home '{}' {why}", self.url));
        let Some((scheme, rest)) = self.url.split_once("://") else {
            return bad("is not a URL; write it as s3://BUCKET or sftp://HOST");
        };
        let rest = rest.trim_end_matches('/');
        let given = |field: &Option<String>| field.is_some();
        let paired = given(&self.access_key_id) == given(&self.secret_access_key);
        match scheme {
            "file" if !rest.starts_with('/') => bad("names no directory; write file:///DIRECTORY"),
            "file" => Ok(()),
            "http" | "https" | "s3" | "ftp" | "ftps" | "sftp"
                if rest.is_empty() || rest.contains('/') =>
            {
                bad("must be scheme and host alone, without a path")
            }
            "s3" if !paired => bad("needs both access_key_id and secret_access_key, or neither"),
            "s3" if self.region.is_none() => bad("needs a region, for example \"us-east-1\""),
            "sftp" if given(&self.password) => {
                bad("cannot log in with a password; give a key without a passphrase")
            }
            "http" | "https" | "s3" | "ftp" | "ftps" | "sftp" => Ok(()),
            _ => bad("has an unknown scheme; use file, ftp, ftps, http, https, s3 or sftp"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn homes_are_found_by_scheme_and_host() {
        let text = r#"
            [[home]]
            url = "s3://results/"
            region = "us-east-1"
            [[home]]
            url = "file:///srv/data"
        "#;
        let settings = HomeSettings::parse(text).expect("settings");
        assert!(settings.for_address("s3://results").is_some());
        assert!(settings.for_address("s3://other").is_none());
        let directories: Vec<_> = settings.directories().collect();
        assert_eq!(directories, [Path::new("/srv/data")]);
    }

    #[test]
    fn errors_name_the_mistake_but_no_secret() {
        for (text, expected) in [
            ("[[home]]\nurl = \"results\"", "is not a URL"),
            ("[[home]]\nurl = \"gopher://h\"", "unknown scheme"),
            ("[[home]]\nurl = \"s3://b\"", "needs a region"),
            ("[[home]]\nurl = \"s3://b/p\"", "without a path"),
            ("[[home]]\nurl = \"file://data\"", "names no directory"),
            (
                "[[home]]\nurl = \"sftp://h\"\npassword = \"hush\"",
                "give a key",
            ),
            (
                "[[home]]\nurl = \"s3://b\"\nregion = \"r\"\naccess_key_id = \"k\"",
                "needs both",
            ),
            ("[[home]]\nurl = \"ftp://h\"\npasword = \"hush\"", "line 3"),
            ("[[home]]\nurl = \"ftp://h\"\npassword = hush", "line 3"),
        ] {
            let why = HomeSettings::parse(text).expect_err("a mistake");
            assert!(why.contains(expected), "{text}: {why}");
            assert!(!why.contains("hush"), "{why}");
        }
    }

    #[test]
    fn a_file_readable_by_others_is_refused() {
        let directory = tempfile::tempdir().expect("directory");
        let path = directory.path().join("homes.toml");
        assert_eq!(
            HomeSettings::load(&path).expect_err("none").code,
            ErrorCode::NotFound
        );
        std::fs::write(&path, "").expect("write");
        let mode = |mode| std::fs::Permissions::from_mode(mode);
        std::fs::set_permissions(&path, mode(0o640)).expect("mode");
        assert_eq!(
            HomeSettings::load(&path).expect_err("open").code,
            ErrorCode::RightMissing
        );
        std::fs::set_permissions(&path, mode(0o600)).expect("mode");
        assert!(HomeSettings::load(&path).is_ok());
    }
}
