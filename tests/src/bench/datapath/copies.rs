//! A scratch volume copied to another node, and files of one sent home, beside `rsync -a` over ssh
//! and `cp -a` of the same files on the same file system: one large file, and many small ones.
//! BAFS checks digests at both ends and has all on disk when it answers; the others do neither.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use bafs_proto::ids::{ExtractId, VolumeId};
use bafs_proto::message::ExtractFile;
use tempfile::TempDir;
use tokio::sync::Semaphore;

use super::{MIB, row};
use crate::TestCluster;
use crate::api::BlockingClient;
use crate::bench::measure::{Samples, Way, interleave, seconds};
use crate::bench::{Options, Report};

/// Small files that are on their way home at once.
const AT_ONCE: usize = 64;

/// How often, and with which pauses, something is looked for that comes soon.
const LOOKS: u32 = 600;
const LOOK: Duration = Duration::from_millis(50);

/// What is copied.
struct Load {
    name: &'static str,
    /// A script that makes the files in the working directory.
    script: String,
    files: u64,
}

pub(super) fn run(options: &Options, report: &mut Report) -> Result<()> {
    let mib = options.pick(2_048, 128);
    let files = options.pick(20_000, 1_000);
    let loads = [
        Load {
            name: "large",
            script: format!("head -c {} /dev/urandom >large", mib * MIB),
            files: 1,
        },
        Load {
            name: "small",
            script: format!("for i in $(seq {files}); do echo $i $i $i $i >file-$i; done"),
            files,
        },
    ];
    let daemon = Daemon::start()?;
    for load in &loads {
        copies(options, report, &daemon, load)?;
    }
    Ok(())
}

/// One load by all ways.
fn copies(options: &Options, report: &mut Report, daemon: &Daemon, load: &Load) -> Result<()> {
    let world = TestCluster::start(&["20GB", "20GB"])?;
    world.wait_for_servers(3)?;
    let create = ["volume", "create", "work", "--node", "n1", "--size", "5GB"];
    let made = world.run_json(&[&create[..], &["--files", "50000"]].concat())?;
    let volume: VolumeId = made["id"]
        .as_str()
        .context("the volume has an id")?
        .parse()?;
    let script = format!("cd /data && {}", load.script);
    let mounted = ["exec", "--mount", "work:/data", "--", "sh", "-c", &script];
    ensure!(world.bafs_command(&mounted).status()?.success(), "no files");
    let plain = Plain::make(load)?;
    let api = BlockingClient::new(&world.cluster.identity())?;
    let [replicate, home] = [
        format!("a volume with {} file(s) to another node", load.files),
        format!("{} file(s) home", load.files),
    ];
    report.section(&format!("{replicate}: seconds"));
    let other = "another node";
    let mut ways = [
        Way::new(other, || replicated(&world)),
        Way::new("rsync -a", || plain.rsync(daemon, &[])),
        Way::new("rsync -a --fsync", || plain.rsync(daemon, &["--fsync"])),
        Way::new("cp -a", || plain.copy()),
    ];
    let rounds = options.pick(5, 2);
    let found = interleave(rounds, &mut ways)?;
    drop(ways);
    tell(report, &format!("replicate_{}", load.name), &found);
    report.section(&format!("{home}: seconds"));
    let mut round = 0;
    let mut ways = [
        Way::new("home", || {
            round += 1;
            extracted(&world, &api, (volume, load.files), round)
        }),
        Way::new("rsync -a", || plain.rsync(daemon, &[])),
        Way::new("rsync -a --fsync", || plain.rsync(daemon, &["--fsync"])),
        Way::new("cp -a", || plain.copy()),
    ];
    let found = interleave(rounds, &mut ways)?;
    drop(ways);
    tell(report, &format!("extract_{}", load.name), &found);
    Ok(())
}

/// Figures are rates over those of the others: larger than 1 is faster.
fn tell(report: &mut Report, figure: &str, found: &[Samples]) {
    let names = ["BAFS", "rsync -a", "rsync -a --fsync", "cp -a"];
    let figures = ["rsync", "rsync_fsync", "cp"];
    let mut rows = vec![row(["way", "s", "its time / BAFS'"])];
    for (at, (name, samples)) in names.iter().zip(found).enumerate() {
        let ratio = samples.ratio_to(&found[0]);
        if let Some(other) = at.checked_sub(1) {
            report.measured(&format!("{figure}_vs_{}", figures[other]), &ratio);
        }
        rows.push(row([name, &samples.to_string(), &ratio.to_string()]));
    }
    report.table(&rows);
}

fn replicated(world: &TestCluster) -> Result<f64> {
    rustix::fs::sync();
    let (took, copy) = seconds(|| world.run_json(&["volume", "replicate", "work", "--to", "n2"]))?;
    let id = copy["id"].as_str().context("the copy has an id")?;
    world.run_json(&["volume", "delete", id])?;
    // What the node still removes would slow down who is next.
    let trash = world.cluster.directory().join("n2/trash");
    let mut looks = LOOKS;
    while fs::read_dir(&trash)?.next().is_some() {
        looks -= 1;
        ensure!(looks > 0, "the copy is not removed");
        std::thread::sleep(LOOK);
    }
    Ok(took)
}

fn extracted(
    world: &TestCluster,
    api: &BlockingClient,
    (volume, files): (VolumeId, u64),
    round: u32,
) -> Result<f64> {
    if files == 1 {
        // The one of the round before takes room.
        let before = world.home.path().join("out/large");
        if before.exists() {
            fs::remove_file(before)?;
        }
    }
    rustix::fs::sync();
    if files == 1 {
        let target = "bafs://home/out/large";
        let arguments = ["volume", "extract", "work", "large", target];
        return Ok(seconds(|| world.run_json(&arguments))?.0);
    }
    let node = world.cluster.address("n1").to_owned();
    let home = world.cluster.home_address().to_owned();
    let permits = std::sync::Arc::new(Semaphore::new(AT_ONCE));
    let sent = (1..=files).map(|number| {
        let (speaker, permits) = (api.client().clone(), permits.clone());
        let (node, home) = (node.clone(), home.clone());
        async move {
            let _permit = permits.acquire().await?;
            let call = ExtractFile {
                volume,
                path: format!("file-{number}"),
                extract: ExtractId::random(),
                home,
                target: format!("out/{round}/file-{number}"),
                home_id: None,
                home_token: speaker.token(),
            };
            speaker.call(&node, call).await?;
            anyhow::Ok(())
        }
    });
    Ok(seconds(|| api.run_all(sent))?.0)
}

/// The same files in a plain directory, and where they are copied to.
struct Plain {
    source: TempDir,
    targets: TempDir,
}

impl Plain {
    fn make(load: &Load) -> Result<Self> {
        let source = tempfile::tempdir()?;
        let made = Command::new("sh")
            .args(["-c", &load.script])
            .current_dir(source.path())
            .status()?;
        ensure!(made.success(), "no files beside the volume");
        let targets = tempfile::tempdir()?;
        Ok(Self { source, targets })
    }

    fn target(&self) -> Result<PathBuf> {
        let target = self.targets.path().join("copy");
        if target.exists() {
            fs::remove_dir_all(&target)?;
        }
        rustix::fs::sync();
        Ok(target)
    }

    fn rsync(&self, daemon: &Daemon, more: &[&str]) -> Result<f64> {
        let target = self.target()?;
        let mut command = Command::new("rsync");
        command.arg("-a").args(more).arg("-e").arg(daemon.shell());
        command.arg(format!("{}/", self.source.path().display()));
        command.arg(format!("root@127.0.0.1:{}/", target.display()));
        done(&mut command)
    }

    fn copy(&self) -> Result<f64> {
        let target = self.target()?;
        done(
            Command::new("cp")
                .arg("-a")
                .arg(self.source.path())
                .arg(target),
        )
    }
}

fn done(command: &mut Command) -> Result<f64> {
    let (took, output) = seconds(|| Ok(command.output()?))?;
    ensure!(
        output.status.success(),
        "{command:?}: {}",
        crate::printed_text(&output)
    );
    Ok(took)
}

/// An ssh daemon of our own.
struct Daemon {
    child: Child,
    directory: TempDir,
    port: u16,
}

impl Daemon {
    fn start() -> Result<Self> {
        let directory = tempfile::tempdir()?;
        let port = std::net::TcpListener::bind("127.0.0.1:0")?
            .local_addr()?
            .port();
        let script = format!(
            "set -e; mkdir -p /run/sshd; D={0}
            ssh-keygen -q -t ed25519 -N '' -f $D/host; ssh-keygen -q -t ed25519 -N '' -f $D/key
            printf \"Port {port}\\nListenAddress 127.0.0.1\\nHostKey $D/host\\nPidFile none\\n\
AuthorizedKeysFile $D/key.pub\\nStrictModes no\\nPermitRootLogin yes\\nUsePAM no\\n\" >$D/sshd.cfg
            exec $(command -v sshd || echo /usr/sbin/sshd) -D -f $D/sshd.cfg",
            directory.path().display()
        );
        let child = Command::new("sh")
            .args(["-c", &script])
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        let daemon = Self {
            child,
            directory,
            port,
        };
        let mut looks = 200;
        while std::net::TcpStream::connect(("127.0.0.1", port)).is_err() {
            looks -= 1;
            ensure!(looks > 0, "sshd does not start: `cargo xtask setup peers`");
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(daemon)
    }

    /// What `rsync -e` wants.
    fn shell(&self) -> String {
        let key = self.key();
        format!(
            "ssh -p {} -i {} -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null \
             -o LogLevel=ERROR -c aes128-gcm@openssh.com",
            self.port,
            key.display()
        )
    }

    fn key(&self) -> PathBuf {
        Path::new(self.directory.path()).join("key")
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
