//! A scratch volume copied to another node, and files of one sent home, beside `rsync -a` over ssh
//! and `cp -a` of the same files on the same file system: one large file, and many small ones.
//! BAFS checks digests at both ends and has all on disk when it answers; the others do neither.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use bafs_proto::ids::{ExtractionId, VolumeId};
use bafs_proto::message::ExtractFile;
use tempfile::TempDir;
use tokio::sync::Semaphore;

use super::file_work::MIB;
use crate::TestCluster;
use crate::api::BlockingClient;
use crate::bench::measure::{BenchmarkVariant, Samples, run_interleaved, table_row, time_seconds};
use crate::bench::{BenchmarkReport, Options};

/// Small files that are on their way home at once.
const CONCURRENT_EXTRACTS: usize = 64;

/// How often, and with which pauses, something is looked for that comes soon.
const POLLS_MAX: u32 = 600;
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The copied data.
struct CopyLoad {
    name: &'static str,
    /// A script that makes the files in the working directory.
    script: String,
    files: u64,
}

pub(super) fn run(options: &Options, report: &mut BenchmarkReport) -> Result<()> {
    let mib = options.choose(2_048, 128);
    let files = options.choose(20_000, 1_000);
    let loads = [
        CopyLoad {
            name: "large",
            script: format!("head -c {} /dev/urandom >large", mib * MIB),
            files: 1,
        },
        CopyLoad {
            name: "small",
            script: format!("for i in $(seq {files}); do echo $i $i $i $i >file-$i; done"),
            files,
        },
    ];
    let daemon = SshDaemon::start()?;
    let mut least = f64::INFINITY;
    for load in &loads {
        least = least.min(measure_copies(options, report, &daemon, load)?);
    }
    report.add_figure("rsync_min", least);
    Ok(())
}

/// One load by all ways; gives the least ratio to `rsync -a`.
fn measure_copies(
    options: &Options,
    report: &mut BenchmarkReport,
    daemon: &SshDaemon,
    load: &CopyLoad,
) -> Result<f64> {
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
    let plain = PlainDirectories::make(load)?;
    let api = BlockingClient::new(&world.cluster.identity())?;
    let [replicate, home] = [
        format!("a volume with {} file(s) to another node", load.files),
        format!("{} file(s) home", load.files),
    ];
    report.print_section(&format!("{replicate}: seconds"));
    let other = "another node";
    let mut ways = [
        BenchmarkVariant::new(other, || time_replication(&world)),
        BenchmarkVariant::new("rsync -a", || plain.time_rsync(daemon, &[])),
        BenchmarkVariant::new("rsync -a --fsync", || {
            plain.time_rsync(daemon, &["--fsync"])
        }),
        BenchmarkVariant::new("cp -a", || plain.time_copy()),
    ];
    let rounds = options.choose(5, 2);
    let found = run_interleaved(rounds, &mut ways)?;
    drop(ways);
    let replicated = report_ratios(report, &format!("replicate_{}", load.name), &found);
    report.print_section(&format!("{home}: seconds"));
    let mut round = 0;
    let mut ways = [
        BenchmarkVariant::new("home", || {
            round += 1;
            time_extraction(&world, &api, (volume, load.files), round)
        }),
        BenchmarkVariant::new("rsync -a", || plain.time_rsync(daemon, &[])),
        BenchmarkVariant::new("rsync -a --fsync", || {
            plain.time_rsync(daemon, &["--fsync"])
        }),
        BenchmarkVariant::new("cp -a", || plain.time_copy()),
    ];
    let found = run_interleaved(rounds, &mut ways)?;
    drop(ways);
    let extracted = report_ratios(report, &format!("extract_{}", load.name), &found);
    Ok(replicated.min(extracted))
}

/// Figures are rates over those of the others: larger than 1 is faster.
/// Gives that of `rsync -a`.
fn report_ratios(report: &mut BenchmarkReport, figure: &str, found: &[Samples]) -> f64 {
    let names = ["BAFS", "rsync -a", "rsync -a --fsync", "cp -a"];
    let figures = ["rsync", "rsync_fsync", "cp"];
    let mut rows = vec![table_row(["way", "s", "its time / BAFS'"])];
    let mut least = f64::INFINITY;
    for (at, (name, samples)) in names.iter().zip(found).enumerate() {
        let ratio = samples.ratio_to(&found[0]);
        if let Some(other) = at.checked_sub(1) {
            least = if other == 0 { ratio.median() } else { least };
            report.add_samples(&format!("{figure}_vs_{}", figures[other]), &ratio);
        }
        rows.push(table_row([name, &samples.to_string(), &ratio.to_string()]));
    }
    report.print_table(&rows);
    least
}

fn time_replication(world: &TestCluster) -> Result<f64> {
    rustix::fs::sync();
    let (took, copy) =
        time_seconds(|| world.run_json(&["volume", "replicate", "work", "--to", "n2"]))?;
    let id = copy["id"].as_str().context("the copy has an id")?;
    world.run_json(&["volume", "delete", id])?;
    // Removals on the node would slow down the next round.
    let trash = world.cluster.directory().join("n2/trash");
    let mut looks = POLLS_MAX;
    while fs::read_dir(&trash)?.next().is_some() {
        looks -= 1;
        ensure!(looks > 0, "the copy is not removed");
        std::thread::sleep(POLL_INTERVAL);
    }
    Ok(took)
}

fn time_extraction(
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
        return Ok(time_seconds(|| world.run_json(&arguments))?.0);
    }
    let node = world.cluster.address("n1").to_owned();
    let home = world.cluster.home_address().to_owned();
    let permits = std::sync::Arc::new(Semaphore::new(CONCURRENT_EXTRACTS));
    let sent = (1..=files).map(|number| {
        let (api_client, permits) = (api.client().clone(), permits.clone());
        let (node, home) = (node.clone(), home.clone());
        async move {
            let _permit = permits.acquire().await?;
            let call = ExtractFile {
                volume,
                path: format!("file-{number}"),
                selections: Vec::new(),
                extraction: ExtractionId::random(),
                home_address: home,
                target_path: format!("out/{round}/file-{number}"),
                home_id: None,
                home_token: api_client.token(),
                fence: None,
            };
            api_client.call(&node, call).await?;
            anyhow::Ok(())
        }
    });
    Ok(time_seconds(|| api.run_all(sent))?.0)
}

/// The same files in a plain directory, and where they are copied to.
struct PlainDirectories {
    source: TempDir,
    targets: TempDir,
}

impl PlainDirectories {
    fn make(load: &CopyLoad) -> Result<Self> {
        let source = tempfile::tempdir()?;
        let made = Command::new("sh")
            .args(["-c", &load.script])
            .current_dir(source.path())
            .status()?;
        ensure!(made.success(), "no files beside the volume");
        let targets = tempfile::tempdir()?;
        Ok(Self { source, targets })
    }

    fn new_target(&self) -> Result<PathBuf> {
        let target = self.targets.path().join("copy");
        if target.exists() {
            fs::remove_dir_all(&target)?;
        }
        rustix::fs::sync();
        Ok(target)
    }

    fn time_rsync(&self, daemon: &SshDaemon, more: &[&str]) -> Result<f64> {
        let target = self.new_target()?;
        let mut command = Command::new("rsync");
        command
            .arg("-a")
            .args(more)
            .arg("-e")
            .arg(daemon.ssh_command());
        command.arg(format!("{}/", self.source.path().display()));
        command.arg(format!("root@127.0.0.1:{}/", target.display()));
        time_command(&mut command)
    }

    fn time_copy(&self) -> Result<f64> {
        let target = self.new_target()?;
        time_command(
            Command::new("cp")
                .arg("-a")
                .arg(self.source.path())
                .arg(target),
        )
    }
}

fn time_command(command: &mut Command) -> Result<f64> {
    let (took, output) = time_seconds(|| Ok(command.output()?))?;
    ensure!(
        output.status.success(),
        "{command:?}: {}",
        crate::printed_text(&output)
    );
    Ok(took)
}

/// An ssh daemon of our own.
struct SshDaemon {
    child: Child,
    directory: TempDir,
    port: u16,
}

impl SshDaemon {
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

    /// The program that `rsync -e` expects.
    fn ssh_command(&self) -> String {
        let key = self.key_path();
        format!(
            "ssh -p {} -i {} -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null \
             -o LogLevel=ERROR -c aes128-gcm@openssh.com",
            self.port,
            key.display()
        )
    }

    fn key_path(&self) -> PathBuf {
        Path::new(self.directory.path()).join("key")
    }
}

impl Drop for SshDaemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
