//! Listings of homes that are no home servers, for whoever compares what they have now with what
//! nodes saw of them. The same backends answer, so equal files have equal identities. Reads no
//! file, and checks no rights: the homes do.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use bafs_proto::Result;
use bafs_proto::limits::MANIFEST_ENTRIES_MAX;
use bafs_proto::message::{ListSource, SourceEntry};
use bafs_proto::time::Deadline;
use bafs_proto::token::Token;
use bafs_proto::{Error, ErrorCode};

use super::home_backend::HomeBackend;
use super::{HomeSettings, SILENCE_MAX, make_foreign_backend, with_deadline};

/// Homes of other kinds, with what this machine is told of them.
#[derive(Default)]
pub struct HomeLister {
    settings: HomeSettings,
    /// Made when first asked for, by address.
    backends: Mutex<BTreeMap<String, Arc<dyn HomeBackend>>>,
}

impl std::fmt::Debug for HomeLister {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("HomeLister")
    }
}

impl HomeLister {
    /// Homes with these settings.
    pub fn new(settings: HomeSettings) -> Self {
        Self {
            settings,
            backends: Mutex::default(),
        }
    }

    /// All that is at a path of a home and below it. `address` is a URL without a path.
    ///
    /// # Errors
    /// What the home answers; `Unsupported` for a home server or a directory, and where files have
    /// no identity; `RightMissing` without the settings that the home needs; `DeadlineExceeded`.
    pub async fn list(&self, address: &str, path: &str) -> Result<Vec<SourceEntry>> {
        let home = self.backend(address)?;
        let (deadline, token) = (Deadline::after(SILENCE_MAX), Token::none());
        let (mut entries, mut after) = (Vec::new(), None);
        loop {
            let path = path.to_owned();
            let call = ListSource {
                path,
                after: after.take(),
            };
            let page = with_deadline(deadline, home.list(&token, call, deadline)).await?;
            after = page.entries.last().map(|entry| entry.path.clone());
            entries.extend(page.entries);
            if entries.len() > MANIFEST_ENTRIES_MAX {
                let text = format!("it has more than {MANIFEST_ENTRIES_MAX} files");
                return Err(Error::new(ErrorCode::Unsupported, text));
            }
            if !page.has_more || after.is_none() {
                return Ok(entries);
            }
        }
    }

    fn backend(&self, address: &str) -> Result<Arc<dyn HomeBackend>> {
        let mut known = self.backends.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(home) = known.get(address) {
            return Ok(home.clone());
        }
        let home = make_foreign_backend(address, &self.settings)?;
        known.insert(address.to_owned(), home.clone());
        Ok(home)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Write};
    use std::net::TcpListener;

    use super::*;

    /// A web server with one file, whose ETag changes with each answer.
    fn start_web_server() -> String {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = format!("http://{}", listener.local_addr().expect("an address"));
        std::thread::spawn(move || {
            let mut version = 0;
            for stream in listener.incoming().flatten() {
                let mut lines = BufReader::new(&stream).lines().map_while(Result::ok);
                let first = lines.next().unwrap_or_default();
                lines.find(String::is_empty);
                let is_there = first.contains(" /data/in ");
                version += u32::from(is_there);
                let answer = match is_there {
                    true => format!("200 OK\r\nContent-Length: 5\r\nETag: \"{version}\""),
                    false => "404 Not Found\r\nContent-Length: 0".to_owned(),
                };
                let _ = write!(&stream, "HTTP/1.1 {answer}\r\nConnection: close\r\n\r\n");
            }
        });
        address
    }

    #[tokio::test]
    async fn changed_file_of_the_web_has_another_identity() {
        let (address, lister) = (start_web_server(), HomeLister::default());
        let first = lister.list(&address, "data/in").await.expect("it is there");
        assert_eq!((first.len(), first[0].identity.size), (1, 5));
        let second = lister.list(&address, "data/in").await.expect("it is there");
        assert_ne!(first[0].identity, second[0].identity);
        let missing = lister.list(&address, "data/none").await;
        assert_eq!(missing.expect_err("none").code, ErrorCode::NotFound);
        let refused = lister
            .list("s3://bucket", "x")
            .await
            .expect_err("no settings");
        assert_eq!(refused.code, ErrorCode::RightMissing);
        let refused = lister.list("a:1", "x").await.expect_err("a home server");
        assert_eq!(refused.code, ErrorCode::Unsupported);
    }
}
