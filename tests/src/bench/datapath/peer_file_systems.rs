//! Other network file systems over loopback, beside a volume behind the network: the same files and
//! programs. A peer that does not start, or fails, is named, and counts as not beaten.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::mount::{MntFlags, umount2};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;

use super::file_work::{FileWork, measure_rate, parse_rate, process_arguments};
use super::mounted_scratch::{MountedScratch, start_remote_cluster};
use crate::bench::measure::{BenchmarkVariant, Samples, format_number, run_interleaved};
use crate::bench::shell::Shell;
use crate::bench::{BenchmarkReport, Options};
use crate::{TestCluster, mounts_matching};

/// A file system that we are compared with.
struct PeerKind {
    name: &'static str,
    /// Required programs.
    programs: &'static [&'static str],
    /// Starts server and client in a network of their own; `$D` is a directory to work in and
    /// `$D/mnt` is where it must appear.
    script: &'static str,
}

/// Two of them refuse the address 127.0.0.1.
const NETWORK_SETUP: &str = "ip link set lo up; ip addr add 10.99.0.1/32 dev lo; mkdir $D/mnt; ";

const KINDS: [PeerKind; 4] = [
    PeerKind {
        name: "GlusterFS",
        programs: &["glusterd", "gluster", "glusterfs"],
        script: "mkdir -p $D/brick $D/work $D/log
            sed \"s#working-directory .*#working-directory $D/work#\" /etc/glusterfs/glusterd.vol \
                >$D/glusterd.vol
            glusterd -f $D/glusterd.vol -p $D/glusterd.pid -l $D/log/glusterd.log
            for i in $(seq 50); do
                gluster --mode=script volume create bench transport tcp 10.99.0.1:$D/brick force \
                    && break
                sleep 0.2
            done
            gluster --mode=script volume start bench
            glusterfs --volfile-server=10.99.0.1 --volfile-id=bench $D/mnt -l $D/log/client.log",
    },
    PeerKind {
        name: "MooseFS",
        programs: &["mfsmaster", "mfschunkserver", "mfsmount", "mfssetgoal"],
        script: "mkdir -p $D/etc $D/master $D/chunk $D/hdd
            cp /var/lib/mfs/metadata.mfs.empty $D/master/metadata.mfs
            echo '* / rw,alldirs,admin,maproot=0:0' >$D/etc/exports.cfg
            echo $D/hdd >$D/etc/hdd.cfg
            own='WORKING_USER = root\\nWORKING_GROUP = root\\nMASTER_HOST = 10.99.0.1\\n'
            printf \"${own}DATA_PATH = $D/master\\nEXPORTS_FILENAME = $D/etc/exports.cfg\\n\" \
                >$D/etc/master.cfg
            for port in MATOML MATOCS MATOCL; do
                echo \"${port}_LISTEN_HOST = 10.99.0.1\" >>$D/etc/master.cfg
            done
            printf \"${own}DATA_PATH = $D/chunk\\nHDD_CONF_FILENAME = $D/etc/hdd.cfg\\n\" \
                >$D/etc/chunk.cfg
            echo 'CSSERV_LISTEN_HOST = 10.99.0.1' >>$D/etc/chunk.cfg
            mfsmaster -c $D/etc/master.cfg start
            mfschunkserver -c $D/etc/chunk.cfg start
            sleep 2
            mfsmount -H 10.99.0.1 $D/mnt
            mfssetgoal -r 1 $D/mnt",
    },
    PeerKind {
        name: "sshfs",
        programs: &["sshd", "ssh-keygen", "sshfs"],
        script: "mkdir -p $D/source /run/sshd
            ssh-keygen -q -t ed25519 -N '' -f $D/host
            ssh-keygen -q -t ed25519 -N '' -f $D/key
            cp $D/key.pub $D/authorized
            printf \"Port 2222\\nListenAddress 10.99.0.1\\nHostKey $D/host\\nPidFile $D/sshd.pid\\n\
AuthorizedKeysFile $D/authorized\\nStrictModes no\\nPermitRootLogin yes\\nUsePAM no\\n\
Subsystem sftp internal-sftp\\n\" >$D/sshd.cfg
            $(command -v sshd) -f $D/sshd.cfg
            sshfs -p 2222 -o IdentityFile=$D/key,StrictHostKeyChecking=no \
                -o UserKnownHostsFile=/dev/null,Ciphers=aes128-gcm@openssh.com \
                root@10.99.0.1:$D/source $D/mnt",
    },
    PeerKind {
        name: "rclone",
        programs: &["sshd", "ssh-keygen", "rclone"],
        script: "mkdir -p $D/source /run/sshd
            ssh-keygen -q -t ed25519 -N '' -f $D/host
            ssh-keygen -q -t ed25519 -N '' -f $D/key
            cp $D/key.pub $D/authorized
            printf \"Port 2223\\nListenAddress 10.99.0.1\\nHostKey $D/host\\nPidFile $D/sshd.pid\\n\
AuthorizedKeysFile $D/authorized\\nStrictModes no\\nPermitRootLogin yes\\nUsePAM no\\n\
Subsystem sftp internal-sftp\\n\" >$D/sshd.cfg
            $(command -v sshd) -f $D/sshd.cfg
            rclone mount --config /dev/null --cache-dir $D/cache --vfs-cache-mode writes --daemon \
                \":sftp,host=10.99.0.1,port=2223,user=root,key_file=$D/key:$D/source\" $D/mnt",
    },
];

/// Time for a peer to start.
const START_TIMEOUT: Duration = Duration::from_secs(40);

/// A peer that runs, in a network of its own.
struct PeerFileSystem {
    name: &'static str,
    first_process: Child,
    mount: PathBuf,
    _directory: TempDir,
}

impl PeerFileSystem {
    fn start(kind: &PeerKind) -> Result<Self> {
        let path = std::env::var("PATH").unwrap_or_default() + ":/usr/sbin:/sbin";
        for program in kind.programs {
            let found = std::env::split_paths(&path).any(|place| place.join(program).is_file());
            if !found {
                bail!("{program} is missing: `cargo xtask setup peers` installs it");
            }
        }
        let directory = tempfile::tempdir()?;
        let log = fs::File::create(directory.path().join("log.txt"))?;
        let script = format!(
            "set -e; {NETWORK_SETUP}{}\nexec sleep infinity",
            kind.script
        );
        let first = Command::new("unshare")
            .arg("--net")
            .args(["sh", "-c", &script])
            .env("D", directory.path())
            .env("PATH", path)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()?;
        let mut peer = Self {
            name: kind.name,
            first_process: first,
            mount: directory.path().join("mnt"),
            _directory: directory,
        };
        let mut waited = Duration::ZERO;
        while !peer.is_mounted() {
            if waited > START_TIMEOUT || peer.first_process.try_wait()?.is_some() {
                bail!("it does not start: {}", peer.read_log());
            }
            std::thread::sleep(Duration::from_millis(100));
            waited += Duration::from_millis(100);
        }
        Ok(peer)
    }

    fn is_mounted(&self) -> bool {
        let text = self.mount.to_str().unwrap_or_default();
        !mounts_matching(text).is_empty() && fs::write(self.mount.join("ready"), "").is_ok()
    }

    fn read_log(&self) -> String {
        let log = self.mount.with_file_name("log.txt");
        let text = fs::read_to_string(log).unwrap_or_default();
        let lines: Vec<_> = text.lines().rev().take(3).collect();
        lines.into_iter().rev().collect::<Vec<_>>().join("; ")
    }
}

impl Drop for PeerFileSystem {
    fn drop(&mut self) {
        let _ = umount2(&self.mount, MntFlags::MNT_DETACH);
        // Its servers left the script's session, but not its network.
        for pid in processes_in_network(self.first_process.id()) {
            let _ = kill(pid, Signal::SIGKILL);
        }
        let _ = self.first_process.wait();
    }
}

/// Processes in the network of this one, unless that is our own.
fn processes_in_network(first: u32) -> Vec<Pid> {
    let network = |process: &Path| fs::read_link(process.join("ns/net")).ok();
    let theirs = network(&Path::new("/proc").join(first.to_string()));
    if theirs.is_none() || theirs == network(Path::new("/proc/self")) {
        return Vec::new();
    }
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries
        .filter(|entry| network(&entry.path()) == theirs)
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok().map(Pid::from_raw))
        .collect()
}

/// Where work is done: rates in MB/s or files/s.
struct MeasuredDirectory<'a> {
    name: &'a str,
    measure_rate: Box<dyn FnMut(FileWork, u64) -> Result<f64> + 'a>,
}

impl<'a> MeasuredDirectory<'a> {
    /// A directory of the host.
    fn on_host(name: &'a str, directory: &'a Path) -> Self {
        let rate = move |work, amount| measure_rate(work, directory, amount);
        let rate = Box::new(rate);
        Self {
            name,
            measure_rate: rate,
        }
    }

    /// A volume within a job.
    fn in_job(name: &'a str, world: &TestCluster) -> Result<Self> {
        let mut shell = Shell::start_in_job(world, "work:/scratch")?;
        let program = std::env::current_exe()?;
        let program = program
            .to_str()
            .context("the path of this program is text")?;
        let program = program.to_owned();
        let rate = move |work, amount| {
            let arguments = process_arguments(work, "/scratch", amount).join(" ");
            parse_rate(
                work,
                amount,
                &shell.run_line(&format!("{program} {arguments}"))?,
            )
        };
        let rate = Box::new(rate);
        Ok(Self {
            name,
            measure_rate: rate,
        })
    }
}

/// Our file systems: the mount of a job, and a mount on the host, where each close waits for the
/// server.
const OWN_DIRECTORIES: usize = 2;

pub(super) fn run(options: &Options, report: &mut BenchmarkReport) -> Result<()> {
    let (mib, files) = (options.choose(256, 64), options.choose(2_000, 500));
    let shown = MountedScratch::start_remote("20GB")?;
    let world = start_remote_cluster("4GB")?;
    let mut peers = Vec::new();
    for kind in &KINDS {
        match PeerFileSystem::start(kind) {
            Ok(peer) => peers.push(peer),
            Err(error) => report.add_missing(kind.name, &format!("{error:#}")),
        }
    }
    report.print_section(&format!(
        "beside peers over loopback: {mib} MiB in MB/s, {files} files of 4 KiB in files/s"
    ));
    let mut places = vec![
        MeasuredDirectory::in_job("BAFS, a job", &world)?,
        MeasuredDirectory::on_host("BAFS, host mount", shown.path()),
    ];
    for peer in &peers {
        places.push(MeasuredDirectory::on_host(peer.name, &peer.mount));
    }
    let mut head = vec!["work".to_owned()];
    head.extend(places.iter().map(|place| place.name.to_owned()));
    head.push("job / best peer".to_owned());
    head.push("host / best peer".to_owned());
    let (found, failed) = measure(places, options, (mib, files))?;
    for (place, error) in &failed {
        report.add_missing(&head[place + 1], error);
    }
    let runs = |place: &usize| !failed.contains_key(place);
    let peers: Vec<_> = (OWN_DIRECTORIES..OWN_DIRECTORIES + peers.len())
        .filter(runs)
        .collect();
    let mut rows = vec![head];
    let (mut least, mut least_cold) = (f64::INFINITY, f64::INFINITY);
    for (work, samples) in FileWork::COMPARED_WITH_PEERS.iter().zip(&found) {
        let mut cells = vec![work.name().to_owned()];
        cells.extend(samples.iter().map(|samples| match samples {
            Some(samples) => samples.to_string(),
            None => "failed".to_owned(),
        }));
        let rate = |place: usize| samples[place].as_ref().map_or(0.0, Samples::median);
        let best = peers.iter().map(|peer| rate(*peer)).fold(0.0, f64::max);
        if best > 0.0 {
            let factor = rate(0) / best;
            least = least.min(factor);
            if FileWork::COLD_SMALL_FILES.contains(work) {
                least_cold = least_cold.min(factor);
            }
        }
        for (ours, figure) in ["peer", "peer_host"].into_iter().enumerate() {
            if best > 0.0 {
                let factor = rate(ours) / best;
                cells.push(format_number(factor));
                report.add_figure(&format!("{figure}_{}", work.name()), factor);
            }
        }
        rows.push(cells);
    }
    report.print_table(&rows);
    if least.is_finite() {
        report.add_figure("net_min_vs_best_peer", least);
        report.add_figure("net_cold_small_vs_best", least_cold);
    }
    report.add_figure("peers_behind", count_beaten(&found, &peers, 0));
    report.add_figure("peers_behind_host", count_beaten(&found, &peers, 1));
    Ok(())
}

/// Peers behind which one of our file systems is in no work.
fn count_beaten(found: &[Vec<Option<Samples>>], peers: &[usize], ours: usize) -> f64 {
    let median =
        |row: &[Option<Samples>], place: usize| row[place].as_ref().map_or(0.0, Samples::median);
    let is_ahead = |row: &[Option<Samples>], peer| median(row, ours) > median(row, peer);
    let is_beaten = |peer: &&usize| found.iter().all(|row| is_ahead(row, **peer));
    peers.iter().filter(is_beaten).count() as f64
}

/// For each work the rates of each place; none of a peer that failed on the way, and why it did.
type WorkRates = (Vec<Vec<Option<Samples>>>, BTreeMap<usize, String>);

fn measure(
    places: Vec<MeasuredDirectory<'_>>,
    options: &Options,
    (mib, files): (u64, u64),
) -> Result<WorkRates> {
    let values = RefCell::new(vec![
        vec![Vec::new(); places.len()];
        FileWork::COMPARED_WITH_PEERS.len()
    ]);
    let failed = RefCell::new(BTreeMap::new());
    let mut ways: Vec<_> = places
        .into_iter()
        .enumerate()
        .map(
            |(
                place,
                MeasuredDirectory {
                    name,
                    measure_rate: mut rate,
                },
            )| {
                let (values, failed) = (&values, &failed);
                BenchmarkVariant::new(name, move || {
                    for (index, work) in FileWork::COMPARED_WITH_PEERS.into_iter().enumerate() {
                        if failed.borrow().contains_key(&place) {
                            break;
                        }
                        let amount = if work.is_bulk() { mib } else { files };
                        match rate(work, amount).context("a round of work") {
                            Ok(found) => values.borrow_mut()[index][place].push(found),
                            Err(error) if place >= OWN_DIRECTORIES => {
                                failed.borrow_mut().insert(place, format!("{error:#}"));
                            }
                            Err(error) => return Err(error),
                        }
                    }
                    Ok(0.0)
                })
            },
        )
        .collect();
    run_interleaved(options.choose(5, 2), &mut ways)?;
    drop(ways);
    let failed = failed.into_inner();
    let samples = |(place, found)| (!failed.contains_key(&place)).then(|| Samples::new(found));
    let by_work = values.into_inner().into_iter();
    let found = by_work.map(|places| places.into_iter().enumerate().map(samples).collect());
    Ok((found.collect(), failed))
}
