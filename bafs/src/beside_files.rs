//! Programs and scripts beside a workflow, as the nodes of a cluster reach them: copies in a
//! directory of their own, which the run serves as a home for as long as it lasts.
//!
//! A copy is written only when it differs: a job compares the times of what it read. The home has
//! one name for all runs of a workflow, so its jobs know their programs again.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result, anyhow};
use bafs_proto::hash::Digest;
use bafs_proto::message::Role;
use bafs_server::home_server::{self, HomeConfig};
use bafs_server::serving::RunningServer;
use bafs_workflow::{LocatedFile, Scheme, Url};

use crate::init;
use crate::pool::find_own_address;

/// The largest file that is brought so: each run compares all of it.
const FILE_BYTES_MAX: u64 = 1 << 30;

/// Digits of a digest that tell workflows apart.
const NAME_DIGITS: usize = 12;

/// The files beside a workflow that it names.
#[derive(Debug)]
pub(crate) struct BesideFiles {
    /// The name of the home that they have.
    host: String,
    /// The directory of the workflow.
    directory: PathBuf,
    /// Where the copies are.
    copies: PathBuf,
    /// Each by its path at the home.
    located: Mutex<BTreeMap<String, PathBuf>>,
}

impl BesideFiles {
    /// Those of a workflow file.
    pub(crate) fn of_workflow(workflow: &Path) -> Self {
        let absolute = workflow
            .canonicalize()
            .unwrap_or_else(|_| workflow.to_owned());
        let machine = nix::unistd::gethostname().unwrap_or_default();
        let whose = [
            machine.as_encoded_bytes(),
            b"\0",
            absolute.as_os_str().as_encoded_bytes(),
        ];
        let digits = Digest::of(&whose.concat()).to_string();
        let mut copies = workflow.as_os_str().to_owned();
        copies.push(".programs");
        Self {
            host: format!("programs-{}", &digits[..NAME_DIGITS]),
            directory: absolute.parent().map(Path::to_owned).unwrap_or_default(),
            copies: PathBuf::from(copies),
            located: Mutex::default(),
        }
    }

    /// Where nodes find a file.
    ///
    /// # Errors
    /// It is no file, as a person is told.
    pub(crate) fn locate(&self, path: &Path) -> Result<LocatedFile, String> {
        let (file, bytes) = find_file(path)?;
        let below = match file.strip_prefix(&self.directory) {
            Ok(below) => below.to_string_lossy().into_owned(),
            Err(_) => {
                let digits = Digest::of(file.as_os_str().as_encoded_bytes()).to_string();
                let name = file.file_name().unwrap_or_default().to_string_lossy();
                format!("{}/{name}", &digits[..NAME_DIGITS])
            }
        };
        let url = Url {
            scheme: Scheme::Bafs,
            host: self.host.clone(),
            path: format!("/{below}"),
        };
        let mut located = self.located.lock().unwrap_or_else(PoisonError::into_inner);
        located.insert(below, file);
        Ok(LocatedFile { url, bytes })
    }

    /// The file that a URL names, if it is one of these.
    pub(crate) fn local_path(&self, url: &Url) -> Option<PathBuf> {
        if url.scheme != Scheme::Bafs || url.host != self.host {
            return None;
        }
        let located = self.located.lock().unwrap_or_else(PoisonError::into_inner);
        located.get(url.path.trim_matches('/')).cloned()
    }

    /// The directory of copies and the path of a URL there, if it is one of these.
    pub(crate) fn copy_of(&self, url: &Url) -> Option<(&Path, String)> {
        self.local_path(url)?;
        Some((&self.copies, url.path.trim_matches('/').to_owned()))
    }

    /// Brings the copies up to date; false when there are none.
    ///
    /// # Errors
    /// A file cannot be read, or its copy not be written.
    pub(crate) fn copy_files(&self) -> Result<bool> {
        let located = self.located.lock().unwrap_or_else(PoisonError::into_inner);
        for (below, file) in located.iter() {
            let copy = self.copies.join(below);
            copy_if_changed(file, &copy).with_context(|| {
                format!(
                    "cannot copy {} to {} for the nodes of the cluster",
                    file.display(),
                    copy.display()
                )
            })?;
        }
        Ok(!located.is_empty())
    }

    /// Serves the copies to the nodes of a cluster.
    ///
    /// # Errors
    /// The identity has no part for servers, or the server does not start.
    pub(crate) async fn serve(&self, identity: &Path, catalog: &str) -> Result<RunningServer> {
        let own = init::load_identity(identity, Role::Server).with_context(|| {
            format!(
                "the programs beside the workflow need a home, and {} has no identity for one; \
                 put them at a home, and write 'program NAME from bafs://HOME/PATH'",
                identity.display()
            )
        })?;
        let address = find_own_address(catalog)?;
        let config = HomeConfig {
            listen: SocketAddr::new(address.ip(), 0).to_string(),
            identity: own,
            root: self.copies.canonicalize()?,
            name: self.host.clone(),
            catalog: Some(catalog.to_owned()),
            group: String::new(),
            limit_bytes_per_s: None,
        };
        let started = home_server::start(config).await;
        started.map_err(|error| anyhow!("cannot serve the programs beside the workflow: {error}"))
    }
}

/// The absolute path of a file, without links, and its bytes.
///
/// # Errors
/// It is no file, as a person is told.
pub(crate) fn find_file(path: &Path) -> Result<(PathBuf, u64), String> {
    let file = path.canonicalize().map_err(|error| error.to_string())?;
    let found = file.metadata().map_err(|error| error.to_string())?;
    if !found.is_file() {
        return Err("it is no file".to_owned());
    }
    if found.len() > FILE_BYTES_MAX {
        return Err("it has more than 1 GiB; put it at a home".to_owned());
    }
    Ok((file, found.len()))
}

fn copy_if_changed(file: &Path, copy: &Path) -> io::Result<()> {
    let (content, mode) = (fs::read(file)?, file.metadata()?.permissions());
    let is_same = fs::read(copy).is_ok_and(|known| known == content)
        && copy.metadata()?.permissions() == mode;
    if is_same {
        return Ok(());
    }
    let directory = copy.parent().unwrap_or_else(|| Path::new("."));
    fs::create_dir_all(directory)?;
    // A home that serves the old one never sees half of it.
    let mut made = tempfile::NamedTempFile::new_in(directory)?;
    io::Write::write_all(&mut made, &content)?;
    made.as_file().set_permissions(mode)?;
    made.persist(copy)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    use super::*;

    #[test]
    fn copies_change_with_their_files_only() {
        let directory = tempfile::tempdir().expect("a directory");
        let workflow = directory.path().join("w.bafs");
        fs::write(&workflow, "").expect("write");
        let script = directory.path().join("bin/run.sh");
        fs::create_dir(directory.path().join("bin")).expect("mkdir");
        fs::write(&script, "#!/bin/sh\n").expect("write");
        fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).expect("chmod");

        let files = BesideFiles::of_workflow(&workflow);
        let located = files.locate(&script).expect("a file");
        assert_eq!(located.url.path, "/bin/run.sh");
        assert_eq!(located.bytes, 10);
        assert_eq!(BesideFiles::of_workflow(&workflow).host, files.host);
        assert!(files.copy_files().expect("copies"));
        let copy = directory.path().join("w.bafs.programs/bin/run.sh");
        let first = copy.metadata().expect("a copy");
        assert_eq!(first.mode() & 0o777, 0o755);
        files.copy_files().expect("copies");
        assert_eq!(copy.metadata().expect("a copy").ino(), first.ino());
        fs::write(&script, "#!/bin/sh\nexit 1\n").expect("write");
        files.copy_files().expect("copies");
        assert_eq!(fs::read(&copy).expect("a copy").len(), 17);
        assert_eq!(files.local_path(&located.url), script.canonicalize().ok());
        assert!(files.locate(directory.path()).is_err());
    }
}
