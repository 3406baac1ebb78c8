//! Which home server a URL of a workflow means, and which path there. Asks nobody.

use std::collections::BTreeMap;

use bafs_proto::message::{Advert, ServerKind};
use bafs_proto::{Error, ErrorCode, Result};
use serde::{Deserialize, Serialize};

use crate::workflow::{Scheme, Url};

/// The home server that stands for `file:///…` of this machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileHome {
    /// Where it listens, `host:port`.
    pub address: String,
    /// The absolute path of the directory that it exports, without a trailing slash.
    pub root: String,
}

/// Home servers by name.
#[derive(Debug, Clone, Default)]
pub struct Homes {
    file_home: Option<FileHome>,
    by_name: BTreeMap<String, String>,
    is_listed: bool,
}

/// A place at home.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HomePath {
    /// The home server, `host:port`.
    pub address: String,
    /// Path below its export, without a leading slash.
    pub path: String,
}

impl Homes {
    /// No home but the one for file URLs, if there is one.
    pub fn new(file_home: Option<FileHome>) -> Self {
        Self {
            file_home,
            by_name: BTreeMap::new(),
            is_listed: false,
        }
    }

    /// Learns the homes of a catalog's listing; those that it does not list are kept, because a
    /// home that is away for a moment is still the same place.
    pub fn learn(&mut self, adverts: &[Advert]) {
        self.is_listed = true;
        for advert in adverts
            .iter()
            .filter(|advert| advert.kind == ServerKind::Home)
        {
            self.by_name
                .insert(advert.name.to_ascii_lowercase(), advert.address.clone());
        }
    }

    /// Whether the catalog was heard of at all: without it no name can be called wrong.
    pub fn is_listed(&self) -> bool {
        self.is_listed
    }

    /// The place that a URL names.
    ///
    /// # Errors
    /// `Unreachable` when the catalog knows no home of that name (yet), `BadPath` when a file is
    /// not below the exported directory, `Unsupported` for other schemes.
    pub fn resolve(&self, url: &Url) -> Result<HomePath> {
        match url.scheme {
            Scheme::Bafs => {
                let known = self.by_name.get(&url.host).cloned();
                let literal = url.host.contains(':').then(|| url.host.clone());
                let address = known.or(literal).ok_or_else(|| {
                    let text = format!(
                        "home '{}' of {url} is not in the catalog: start it, or write its \
                         address as bafs://HOST:PORT/PATH",
                        url.host
                    );
                    Error::new(ErrorCode::Unreachable, text)
                })?;
                Ok(HomePath {
                    address,
                    path: below_root(&url.path),
                })
            }
            Scheme::File => self.resolve_file(url),
            Scheme::Ftp | Scheme::Http | Scheme::Https | Scheme::S3 | Scheme::Sftp => {
                let text = format!(
                    "{url} cannot be reached: only bafs:// and file:// are served; export the \
                     data with `bafs home` and write bafs://NAME/PATH"
                );
                Err(Error::new(ErrorCode::Unsupported, text))
            }
        }
    }

    fn resolve_file(&self, url: &Url) -> Result<HomePath> {
        let Some(home) = &self.file_home else {
            let text = format!(
                "{url} names a file of this machine, but no home serves it: use bafs://NAME/PATH, \
                 or run with --local"
            );
            return Err(Error::new(ErrorCode::Unsupported, text));
        };
        let root = home.root.trim_end_matches('/');
        match url.path.strip_prefix(root) {
            Some(rest) if rest.is_empty() || rest.starts_with('/') => Ok(HomePath {
                address: home.address.clone(),
                path: below_root(rest),
            }),
            _ => {
                let text =
                    format!("{url} is not below '{root}', the directory that the home exports");
                Err(Error::new(ErrorCode::BadPath, text))
            }
        }
    }
}

fn below_root(path: &str) -> String {
    path.trim_start_matches('/').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolve(homes: &Homes, url: &str) -> Result<HomePath, ErrorCode> {
        homes
            .resolve(&url.parse().unwrap())
            .map_err(|error| error.code)
    }

    #[test]
    fn names_addresses_and_files() {
        let file_home = FileHome {
            address: "f:1".to_owned(),
            root: "/srv/data".to_owned(),
        };
        let mut homes = Homes::new(Some(file_home));
        let place = |address: &str, path: &str| {
            Ok(HomePath {
                address: address.to_owned(),
                path: path.to_owned(),
            })
        };
        assert_eq!(
            resolve(&homes, "bafs://home/a"),
            Err(ErrorCode::Unreachable)
        );
        homes.by_name.insert("home".to_owned(), "h:2".to_owned());
        assert_eq!(resolve(&homes, "bafs://Home/a/b"), place("h:2", "a/b"));
        assert_eq!(
            resolve(&homes, "bafs://10.0.0.1:7/"),
            place("10.0.0.1:7", "")
        );
        assert_eq!(resolve(&homes, "file:///srv/data/x"), place("f:1", "x"));
        assert_eq!(resolve(&homes, "file:///srv/data"), place("f:1", ""));
        assert_eq!(
            resolve(&homes, "file:///srv/database"),
            Err(ErrorCode::BadPath)
        );
        assert_eq!(resolve(&homes, "ftp://home/a"), Err(ErrorCode::Unsupported));
        assert_eq!(
            resolve(&Homes::default(), "file:///a"),
            Err(ErrorCode::Unsupported)
        );
    }
}
