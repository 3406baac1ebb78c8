//! The directory of a pool: what it is, its pilots, their scripts and output, and the identity of
//! its nodes. It is on a file system that the nodes see, and nobody else may read it.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use bafs_engine::logic::{PilotNumber, PilotSummary, PoolController, PoolSettings};
use bafs_engine::{PilotId, PilotSpec};
use bafs_proto::identity::Identity;
use bafs_proto::message::Role;
use serde::{Deserialize, Serialize};

use crate::init;
use crate::program_file::program_file;

const POOL_FILE: &str = "pool.json";
const STATE_FILE: &str = "state.json";
const LOCK_FILE: &str = "controller.lock";
const IDENTITY_DIRECTORY: &str = "identity";

/// What a pool is, for its controller and its pilots.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct PoolFile {
    /// The batch system.
    pub(super) engine: String,
    /// Most nodes at a time.
    pub(super) nodes_max: usize,
    /// Address of the catalog.
    pub(super) catalog: String,
    /// Space of each node, as on the command line.
    pub(super) node_size: String,
    /// Time limit of each pilot.
    pub(super) time_limit_s: Option<u64>,
    /// Hosts for SSH.
    pub(super) hosts: Vec<String>,
    /// Directory for stores, if it is not the pilot's `$TMPDIR`.
    pub(super) store: Option<PathBuf>,
    /// The user's options for the batch system.
    pub(super) engine_options: Vec<String>,
    /// Of a temporary cluster: how long a pilot stays without the catalog, which ends with its run.
    #[serde(default)]
    pub(super) catalog_timeout_s: Option<u64>,
    /// Of a temporary cluster: the machine of its run. Only there it is known whether that lives.
    #[serde(default)]
    pub(super) run_host: Option<String>,
}

/// The pilots of a pool.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct PoolState {
    pub(super) next_number: u64,
    pub(super) pilots: Vec<SavedPilot>,
}

/// A pilot that may exist.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SavedPilot {
    pub(super) number: u64,
    /// Nothing when nobody got the id.
    pub(super) id: Option<String>,
}

impl SavedPilot {
    pub(super) fn pilot_id(&self) -> Option<PilotId> {
        self.id.clone().map(PilotId)
    }

    pub(super) fn pilot_number(&self) -> PilotNumber {
        PilotNumber(self.number)
    }
}

/// A pool's place. A controller holds it locked.
#[derive(Debug, Clone)]
pub(super) struct PoolDirectory {
    path: PathBuf,
    name: String,
    _lock: Option<Arc<File>>,
}

impl PoolDirectory {
    /// The pool of this name for its controller, new or as a killed controller left it.
    pub(super) fn open_or_create(name: &str, file: &PoolFile, identity: &Path) -> Result<Self> {
        check_name(name)?;
        let path = pools_directory()?.join(name);
        let mut builder = DirBuilder::new();
        builder
            .recursive(true)
            .mode(0o700)
            .create(&path)
            .with_context(|| {
                format!("cannot create the directory {} of the pool", path.display())
            })?;
        let lock = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            .open(path.join(LOCK_FILE))?;
        if lock.try_lock().is_err() {
            bail!("pool {name} has a command already; end it with: bafs pool remove {name}");
        }
        lock.set_len(0)?;
        write!(&lock, "{}", std::process::id())?;
        let identity_path = path.join(IDENTITY_DIRECTORY);
        if file.run_host.is_some() && identity_path.exists() {
            // It is that of an earlier temporary cluster, which is gone.
            fs::remove_dir_all(&identity_path)
                .with_context(|| identity_path.display().to_string())?;
        }
        for role in [Role::Server, Role::Agent] {
            let target = init::identity_directory(&identity_path, role);
            // The pilots of a killed controller may be reading it.
            if !target.exists() {
                Identity::load(&init::identity_directory(identity, role), role)
                    .and_then(|identity| identity.save(&target))
                    .with_context(|| format!("--identity {}", identity.display()))?;
            }
        }
        let directory = Self {
            path,
            name: name.to_owned(),
            _lock: Some(Arc::new(lock)),
        };
        directory.write_private(POOL_FILE, &serde_json::to_vec(file)?)?;
        Ok(directory)
    }

    /// The pool of this name, to look at.
    pub(super) fn open(name: &str) -> Result<Self> {
        check_name(name)?;
        let path = pools_directory()?.join(name);
        ensure!(
            path.join(POOL_FILE).exists(),
            "no pool '{name}'; `bafs pool list` names them"
        );
        Ok(Self {
            path,
            name: name.to_owned(),
            _lock: None,
        })
    }

    /// Every pool of this user.
    pub(super) fn list() -> Result<Vec<Self>> {
        let entries = match fs::read_dir(pools_directory()?) {
            Ok(entries) => entries,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(error.into()),
        };
        let names = entries.flatten().map(|entry| entry.file_name());
        let mut pools: Vec<Self> = names
            .filter_map(|name| Self::open(name.to_str()?).ok())
            .collect();
        pools.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(pools)
    }

    /// Pools of temporary clusters whose runs were killed on this machine, locked.
    pub(super) fn list_abandoned(host: &str) -> Result<Vec<Self>> {
        let claim = |pool: Self| {
            let file = pool.read_file().ok()?;
            let lock = File::open(pool.path.join(LOCK_FILE)).ok()?;
            let is_abandoned = file.run_host.as_deref() == Some(host) && lock.try_lock().is_ok();
            is_abandoned.then(|| Self {
                _lock: Some(Arc::new(lock)),
                ..pool
            })
        };
        Ok(Self::list()?.into_iter().filter_map(claim).collect())
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn exists(&self) -> bool {
        self.path.join(POOL_FILE).exists()
    }

    /// Process of the controller, if one serves the pool.
    pub(super) fn controller_pid(&self) -> Option<i32> {
        let path = self.path.join(LOCK_FILE);
        let lock = File::open(&path).ok()?;
        lock.try_lock()
            .is_err()
            .then(|| fs::read_to_string(path).ok()?.trim().parse().ok())?
    }

    pub(super) fn read_file(&self) -> Result<PoolFile> {
        read_pool_file(&self.path)
    }

    /// The pilots that a controller wrote down; none when nothing was written.
    pub(super) fn read_state(&self) -> Result<PoolState> {
        let path = self.path.join(STATE_FILE);
        match fs::read(&path) {
            Ok(text) => serde_json::from_slice(&text).with_context(|| path.display().to_string()),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(PoolState::default()),
            Err(error) => Err(error).with_context(|| path.display().to_string()),
        }
    }

    pub(super) fn resume_controller(&self, settings: PoolSettings) -> Result<PoolController> {
        Ok(start_controller(&self.read_state()?, settings))
    }

    /// Writes down the pilots, durably: before one is submitted, so that none is forgotten.
    pub(super) fn write_state(&self, next_number: u64, pilots: &[PilotSummary]) -> Result<()> {
        let pilots = pilots.iter().map(|pilot| SavedPilot {
            number: pilot.pilot.0,
            id: pilot.id.as_ref().map(|id| id.0.clone()),
        });
        let state = PoolState {
            next_number,
            pilots: pilots.collect(),
        };
        self.write_private(STATE_FILE, &serde_json::to_vec(&state)?)
    }

    /// Name of a pilot, of its batch job and of its node.
    pub(super) fn pilot_name(&self, number: u64) -> String {
        format!("bafs-{}-{number}", self.name)
    }

    /// Number of a node of this pool.
    pub(super) fn parse_pilot_name(&self, node: &str) -> Option<PilotNumber> {
        let rest = node
            .strip_prefix("bafs-")?
            .strip_prefix(self.name.as_str())?;
        rest.strip_prefix('-')?.parse().ok().map(PilotNumber)
    }

    /// Writes the script of a pilot. It names the directory only; what is secret is in files there.
    pub(super) fn write_pilot(&self, pool: &PoolFile, number: u64) -> Result<PilotSpec> {
        let name = self.pilot_name(number);
        let pilot = pilot_spec(pool, &name, &self.path);
        let program = program_file()?;
        let script = format!(
            "#!/bin/sh\n# A node of the BAFS pool {}.\nprogram={}\n\
             [ -x \"$program\" ] || program=bafs\nexec \"$program\" pool pilot {} {name}\n",
            self.name,
            quote(program)?,
            quote(&self.path)?
        );
        self.write_private(&format!("{name}.sh"), script.as_bytes())?;
        Ok(pilot)
    }

    /// What the output of a pilot says, its end.
    pub(super) fn read_pilot_log(&self, number: u64) -> String {
        let path = self.path.join(format!("{}.log", self.pilot_name(number)));
        let text = fs::read(path).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let mut lines = text.lines().map(str::trim);
        lines
            .rfind(|line| !line.is_empty())
            .unwrap_or_default()
            .to_owned()
    }

    /// Removes all of it.
    pub(super) fn remove(self) -> Result<()> {
        // First what makes it a pool: whoever waits for its end looks for that.
        let _ = fs::remove_file(self.path.join(POOL_FILE));
        fs::remove_dir_all(&self.path).with_context(|| self.path.display().to_string())
    }

    fn write_private(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let (draft, path) = (
            self.path.join(format!("{name}.draft")),
            self.path.join(name),
        );
        let _ = fs::remove_file(&draft);
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&draft)
            .with_context(|| draft.display().to_string())?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&draft, &path).with_context(|| path.display().to_string())
    }
}

/// What the pool in a directory is.
pub(super) fn read_pool_file(directory: &Path) -> Result<PoolFile> {
    let path = directory.join(POOL_FILE);
    let text = fs::read(&path).with_context(|| {
        format!(
            "cannot read {}; the nodes of a pool must see the directory of their user's state",
            path.display()
        )
    })?;
    serde_json::from_slice(&text).with_context(|| path.display().to_string())
}

/// The identity for the nodes of the pool in a directory.
pub(super) fn identity_of(directory: &Path) -> PathBuf {
    directory.join(IDENTITY_DIRECTORY)
}

/// A pilot with its files in a directory.
pub(super) fn pilot_spec(pool: &PoolFile, name: &str, directory: &Path) -> PilotSpec {
    // SSH takes the user's options for itself.
    let options = match pool.engine.as_str() {
        "ssh" | "local" => Vec::new(),
        _ => pool.engine_options.clone(),
    };
    PilotSpec {
        name: name.to_owned(),
        script: directory.join(format!("{name}.sh")),
        log: directory.join(format!("{name}.log")),
        time_limit_s: pool.time_limit_s,
        options,
    }
}

/// `$XDG_STATE_HOME/bafs/pools`, by default below the home directory, which nodes see.
fn pools_directory() -> Result<PathBuf> {
    let named = |name| std::env::var_os(name).filter(|value| !value.is_empty());
    let state = named("XDG_STATE_HOME").map(PathBuf::from);
    let home = || named("HOME").map(|home| Path::new(&home).join(".local/state"));
    let state = state.or_else(home);
    Ok(state
        .context("neither HOME nor XDG_STATE_HOME is set")?
        .join("bafs/pools"))
}

/// It becomes part of job names and paths.
fn check_name(name: &str) -> Result<()> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_".contains(c);
    ensure!(
        !name.is_empty() && name.len() <= 64 && name.chars().all(is_plain),
        "'{}' cannot name a pool; use up to 64 letters, digits, '-' and '_'",
        name.escape_debug()
    );
    Ok(())
}

fn quote(path: &Path) -> Result<String> {
    let text = path
        .to_str()
        .with_context(|| format!("{} is not UTF-8", path.display()))?;
    Ok(format!("'{}'", text.replace('\'', r"'\''")))
}

/// A controller that continues or begins.
fn start_controller(state: &PoolState, settings: PoolSettings) -> PoolController {
    let pilots = state
        .pilots
        .iter()
        .map(|pilot| (pilot.pilot_number(), pilot.pilot_id()));
    PoolController::resume(settings, pilots.collect(), state.next_number.max(1))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn test_directory(path: &Path) -> PoolDirectory {
        PoolDirectory {
            path: path.to_owned(),
            name: "night".to_owned(),
            _lock: None,
        }
    }

    #[test]
    fn pool_files_are_readable_by_their_owner() {
        let place = tempfile::tempdir().expect("a directory");
        let directory = test_directory(place.path());
        let pilot = directory
            .write_pilot(&PoolFile::default(), 3)
            .expect("a script");
        let mode = fs::metadata(&pilot.script)
            .expect("it exists")
            .permissions()
            .mode();
        assert_eq!(mode & 0o777, 0o600);
        let script = fs::read_to_string(&pilot.script).expect("a script");
        assert!(
            script.contains("pool pilot") && !script.contains("identity"),
            "{script}"
        );
    }

    #[test]
    fn node_names_lead_back_to_pilots() {
        let directory = test_directory(Path::new("/x"));
        let name = directory.pilot_name(12);
        assert_eq!(directory.parse_pilot_name(&name), Some(PilotNumber(12)));
        for other in ["bafs-night2-1", "n1", "bafs-night-x", "bafs-night"] {
            assert_eq!(directory.parse_pilot_name(other), None, "{other}");
        }
    }

    #[test]
    fn written_state_is_read_back() {
        let place = tempfile::tempdir().expect("a directory");
        let directory = test_directory(place.path());
        assert_eq!(
            directory.read_state().expect("none yet"),
            PoolState::default()
        );
        let pilot = PilotSummary {
            pilot: PilotNumber(7),
            id: Some(PilotId("99".to_owned())),
            status: bafs_engine::logic::PilotStatus::Queued,
        };
        directory.write_state(8, &[pilot]).expect("it is written");
        let state = directory.read_state().expect("it is there");
        assert_eq!(state.next_number, 8);
        assert_eq!(state.pilots[0].pilot_id(), Some(PilotId("99".to_owned())));
    }

    #[test]
    fn pool_names_stay_in_their_directory() {
        for wrong in ["", "../x", "a/b", "a b", "."] {
            assert!(check_name(wrong).is_err(), "{wrong}");
        }
        assert!(check_name("run-12_a").is_ok());
    }
}
