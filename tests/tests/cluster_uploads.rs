//! Nodes that are killed while they send a result: nothing half-written is seen at a home of any
//! kind, and a repetition brings the whole, from where it was if the home keeps that.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use bafs_proto::ids::{ExtractionId, VolumeId};
use bafs_proto::message::ExtractFile;
use bafs_tests::api::BlockingClient;
use bafs_tests::content::Content;
use bafs_tests::external_servers::{start_ftp_server, start_object_store, start_sshd};
use bafs_tests::{TestCluster, report_skip};

const RESULT_BYTES: usize = 64 << 20;

/// The node is killed when so much of the result is at home, in bytes.
const KILL_AFTER_BYTES: u64 = 12 << 20;

/// Pieces that may be sent twice, and what else the node writes meanwhile, in bytes.
const SLACK_BYTES: u64 = 4 << 20;

/// A home of some kind.
struct UploadHome {
    address: String,
    /// What the path of the home's files begins with, as the node names it.
    prefix: String,
    /// Where all that it keeps is on this machine.
    root: PathBuf,
    /// Where its files are.
    files: PathBuf,
}

impl UploadHome {
    fn new(address: String, prefix: &str, root: &Path) -> Self {
        let (root, files) = (root.to_owned(), root.to_owned());
        let prefix = prefix.to_owned();
        Self {
            address,
            prefix,
            root,
            files,
        }
    }
}

/// Bytes of all files below a directory, without the table of uploads, which is no part of any.
fn bytes_below(directory: &Path) -> u64 {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let bytes = entries.map(|entry| match entry.metadata() {
        Ok(found) if found.is_dir() => bytes_below(&entry.path()),
        Ok(_) if entry.file_name() == "uploads.redb" => 0,
        Ok(found) => found.len(),
        Err(_) => 0,
    });
    bytes.sum()
}

/// A node that knows these homes, with a volume that has a result.
struct UploadNode {
    world: TestCluster,
    api: BlockingClient,
    volume: VolumeId,
    content: Content,
}

impl UploadNode {
    fn start(settings: &str, own: &Path) -> Result<Self> {
        let homes = own.join("homes.toml");
        fs::write(&homes, settings)?;
        fs::set_permissions(&homes, fs::Permissions::from_mode(0o600))?;
        let mut world = TestCluster::start(&[])?;
        let homes = homes.to_string_lossy().into_owned();
        let more = ["--size", "200MB", "--homes", homes.as_str()];
        world.cluster.add_node("sender", &more)?;
        world.wait_for_servers(2)?;
        let made = world.run_json(&[
            "volume", "create", "work", "--node", "sender", "--size", "100MB",
        ])?;
        let volume = made["id"].as_str().context("the volume has an id")?;
        let tree = world
            .cluster
            .directory()
            .join("sender/volumes")
            .join(volume);
        let content = Content::new(31, RESULT_BYTES);
        content.write_file(&tree.join("tree/result"))?;
        let volume = volume
            .parse()
            .map_err(|_| anyhow::anyhow!("no id: {volume}"))?;
        let api = BlockingClient::new(&world.cluster.identity())?;
        Ok(Self {
            world,
            api,
            volume,
            content,
        })
    }

    /// Sends the result and kills the node when a part of it has arrived; starts it again, and
    /// lets the call be repeated. Returns how much was there when the node was dead; `None` when it
    /// was too fast.
    fn send_and_kill(&mut self, place: &UploadHome, name: &str) -> Result<Option<u64>> {
        let target = place.files.join(name);
        let before = bytes_below(&place.root);
        let call = ExtractFile {
            volume: self.volume,
            path: "result".to_owned(),
            selections: Vec::new(),
            extraction: ExtractionId::random(),
            home_address: place.address.clone(),
            home_id: None,
            target_path: format!("{}{name}", place.prefix),
            home_token: self.api.client().token(),
            fence: None,
        };
        let node = self.world.cluster.address("sender").to_owned();
        let (api, cluster) = (&self.api, &mut self.world.cluster);
        let part = std::thread::scope(|scope| -> Result<_> {
            let sending = scope.spawn(|| api.block_on(api.client().call(&node, call)));
            let mut part = 0;
            while !sending.is_finished() && part < KILL_AFTER_BYTES {
                part = bytes_below(&place.root).saturating_sub(before);
                std::thread::sleep(Duration::from_micros(200));
            }
            cluster.kill("sender")?;
            let part = bytes_below(&place.root).saturating_sub(before);
            let seen = target.exists();
            // Less could be sent again without anybody seeing it.
            ensure!(
                seen || part > SLACK_BYTES,
                "only {part} bytes were sent, so nothing is tested"
            );
            cluster.restart("sender")?;
            let receipt = sending.join().ok().context("who sends broke off")??;
            ensure!(receipt.size == RESULT_BYTES as u64, "{receipt:?}");
            Ok((!seen).then_some(part))
        })?;
        let wrong = self.content.count_wrong_bytes(0, &fs::read(&target)?);
        ensure!(wrong == 0, "{wrong} bytes are wrong");
        fs::remove_file(&target)?;
        Ok(part)
    }

    /// As [`Self::send_and_kill`], until the node was not too fast.
    fn upload_despite_kill(&mut self, place: &UploadHome) -> Result<u64> {
        for attempt in 0..20 {
            if let Some(part) = self.send_and_kill(place, &format!("result-{attempt}"))? {
                return Ok(part);
            }
        }
        anyhow::bail!("the node was never killed before it was done")
    }

    /// Bytes that the node's present life has written to files and pipes.
    fn read_written_bytes(&self) -> Result<u64> {
        let pid = self.world.cluster.pid("sender")?;
        let io = fs::read_to_string(format!("/proc/{pid}/io"))?;
        let line = io.lines().find_map(|line| line.strip_prefix("wchar: "));
        Ok(line.context("/proc tells what was written")?.parse()?)
    }
}

/// Whether nothing of an upload is left at a home.
fn check_nothing_left(place: &UploadHome) -> Result<()> {
    let left = bytes_below(&place.root);
    ensure!(left < 1 << 20, "{left} bytes are left at {}", place.address);
    Ok(())
}

#[test]
fn cluster_uploads_to_a_directory_outlive_kill_9() -> Result<()> {
    let own = tempfile::tempdir()?;
    let root = own.path().join("files");
    fs::create_dir(&root)?;
    let settings = format!("[[home]]\nurl = \"file://{}\"\n", root.display());
    let mut sender = UploadNode::start(&settings, own.path())?;
    let prefix = format!("{}/", root.display());
    let place = UploadHome::new("file://".to_owned(), prefix.trim_start_matches('/'), &root);
    let part = sender.upload_despite_kill(&place)?;
    // The new life wrote the rest alone.
    let (written, rest) = (sender.read_written_bytes()?, RESULT_BYTES as u64 - part);
    ensure!(written <= rest + SLACK_BYTES, "{written} bytes for {rest}");
    check_nothing_left(&place)
}

#[test]
fn cluster_uploads_to_home_servers_outlive_kill_9() -> Result<()> {
    let own = tempfile::tempdir()?;
    let mut sender = UploadNode::start("", own.path())?;
    let (home, root) = (
        sender.world.cluster.home_address().to_owned(),
        sender.world.home.path().to_owned(),
    );
    let place = UploadHome::new(home.clone(), "", &root);
    let part = sender.upload_despite_kill(&place)?;
    ensure!(part >= KILL_AFTER_BYTES, "only {part} bytes were there");
    let counters = sender
        .api
        .block_on(sender.api.client().read_counters(&home))?;
    let came = counters.get("home_written_bytes").copied().unwrap_or(0);
    // Attempts that were too fast came whole.
    let twice = came % RESULT_BYTES as u64;
    ensure!(twice <= SLACK_BYTES, "{twice} bytes came twice");
    check_nothing_left(&place)
}

#[test]
fn cluster_uploads_by_ssh_outlive_kill_9() -> Result<()> {
    let own = tempfile::tempdir()?;
    let root = own.path().join("files");
    fs::create_dir(&root)?;
    let (_server, port, settings) = start_sshd(own.path())?;
    let mut sender = UploadNode::start(&settings, own.path())?;
    let prefix = format!("{}/", root.display());
    let address = format!("sftp://127.0.0.1:{port}");
    let place = UploadHome::new(address, prefix.trim_start_matches('/'), &root);
    let part = sender.upload_despite_kill(&place)?;
    let (written, rest) = (sender.read_written_bytes()?, RESULT_BYTES as u64 - part);
    ensure!(written <= rest + SLACK_BYTES, "{written} bytes for {rest}");
    check_nothing_left(&place)
}

#[test]
fn cluster_uploads_by_ftp_outlive_kill_9() -> Result<()> {
    let own = tempfile::tempdir()?;
    let root = own.path().join("files");
    fs::create_dir(&root)?;
    let (_server, port, settings) = start_ftp_server(&root)?;
    let mut sender = UploadNode::start(&settings, own.path())?;
    let place = UploadHome::new(format!("ftp://127.0.0.1:{port}"), "", &root);
    sender.upload_despite_kill(&place)?;
    check_nothing_left(&place)
}

/// A bucket keeps parts of its own, and the upload begins anew.
#[test]
fn cluster_uploads_to_a_bucket_outlive_kill_9() -> Result<()> {
    let own = tempfile::tempdir()?;
    let root = own.path().join("objects");
    fs::create_dir(&root)?;
    let Some((_server, settings)) = start_object_store(&root)? else {
        let why = "there is no s3s-fs; `cargo xtask test` builds it";
        report_skip("cluster_uploads_to_a_bucket_outlive_kill_9", why);
        return Ok(());
    };
    let mut sender = UploadNode::start(&settings, own.path())?;
    let place = UploadHome {
        files: root.join("bucket"),
        ..UploadHome::new("s3://bucket".to_owned(), "", &root)
    };
    sender.upload_despite_kill(&place)?;
    Ok(())
}
