//! System packages: finds what is missing, installs it when it may, otherwise says how.
//! Downloads nothing but packages of the system's own registry.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Result, bail};
use clap::ValueEnum;

use crate::shell;

/// What the packages are needed for; each purpose needs what those before it need.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum Purpose {
    /// To build and run the demo.
    Demo,
    /// To build and run every test.
    Test,
    /// To run the benchmarks.
    Bench,
    /// To test with real batch systems, whose services are not started, and with a browser. Tests
    /// go on without these.
    BatchSystems,
    /// To compare with other network file systems in `bench datapath`. Nothing asks for it by
    /// itself: these packages start services.
    Peers,
}

/// How to see that a package is there: by what it gives, so that other ways to install it count.
enum PackageContent {
    Programs(&'static [&'static str]),
    File(&'static str),
}

struct Package {
    name: &'static str,
    reason: &'static str,
    content: PackageContent,
    first_needed_by: Purpose,
}

/// Real protein sequences that the demo's database grows from.
const SEQUENCE_FILE: &str = "/usr/share/doc/hmmer/examples/tutorial/globins45.fa";

const PACKAGES: &[Package] = &[
    Package {
        name: "build-essential",
        reason: "a C compiler and linker, to build the dependencies",
        content: PackageContent::Programs(&["cc", "make"]),
        first_needed_by: Purpose::Demo,
    },
    Package {
        name: "ncbi-blast+",
        reason: "blastp and makeblastdb, the unmodified programs of the main job",
        content: PackageContent::Programs(&["blastp", "makeblastdb"]),
        first_needed_by: Purpose::Demo,
    },
    Package {
        name: "hmmer-examples",
        reason: "real protein sequences, from which the demo's database is made",
        content: PackageContent::File(SEQUENCE_FILE),
        first_needed_by: Purpose::Demo,
    },
    Package {
        name: "fuse3",
        reason: "fusermount3, by which an ordinary user mounts",
        content: PackageContent::Programs(&["fusermount3"]),
        first_needed_by: Purpose::Demo,
    },
    Package {
        name: "mawk",
        reason: "awk, for the second stage of the main job",
        content: PackageContent::Programs(&["awk"]),
        first_needed_by: Purpose::Demo,
    },
    Package {
        name: "util-linux",
        reason: "unshare, setpriv and findmnt, to make name spaces and look into them",
        content: PackageContent::Programs(&["unshare", "setpriv", "findmnt"]),
        first_needed_by: Purpose::Test,
    },
    Package {
        name: "iproute2",
        reason: "ip and tc, to make several hosts on one machine",
        content: PackageContent::Programs(&["ip", "tc"]),
        first_needed_by: Purpose::Test,
    },
    Package {
        name: "nftables",
        reason: "nft, to cut servers off from each other in a network of their own",
        content: PackageContent::Programs(&["nft"]),
        first_needed_by: Purpose::Test,
    },
    Package {
        name: "procps",
        reason: "ps and pgrep, to see that no process is left behind",
        content: PackageContent::Programs(&["ps", "pgrep"]),
        first_needed_by: Purpose::Test,
    },
    Package {
        name: "openmpi-bin",
        reason: "mpirun, whose sessions of several jobs must not meet",
        content: PackageContent::Programs(&["mpirun"]),
        first_needed_by: Purpose::Test,
    },
    Package {
        name: "git",
        reason: "a program that must work on a mount",
        content: PackageContent::Programs(&["git"]),
        first_needed_by: Purpose::Test,
    },
    Package {
        name: "sqlite3",
        reason: "a program that must work on a mount: locks, mmap, fsync",
        content: PackageContent::Programs(&["sqlite3"]),
        first_needed_by: Purpose::Test,
    },
    Package {
        name: "attr",
        reason: "getfattr and setfattr, for extended attributes on a mount",
        content: PackageContent::Programs(&["getfattr", "setfattr"]),
        first_needed_by: Purpose::Test,
    },
    Package {
        name: "libacl1-dev",
        reason: "a library that the test suite pjdfstest is linked with",
        content: PackageContent::File("/usr/include/sys/acl.h"),
        first_needed_by: Purpose::Test,
    },
    Package {
        name: "nginx-light",
        reason: "a web server, as a home of another kind",
        content: PackageContent::Programs(&["nginx"]),
        first_needed_by: Purpose::Test,
    },
    Package {
        name: "prometheus",
        reason: "to see that it understands the metrics",
        content: PackageContent::Programs(&["prometheus", "promtool"]),
        first_needed_by: Purpose::Test,
    },
    Package {
        name: "openssl",
        reason: "a certificate for that web server",
        content: PackageContent::Programs(&["openssl"]),
        first_needed_by: Purpose::Test,
    },
    Package {
        name: "openssh-server",
        reason: "sshd, as a home of another kind",
        content: PackageContent::Programs(&["sshd"]),
        first_needed_by: Purpose::Test,
    },
    Package {
        name: "openssh-client",
        reason: "ssh, by which homes behind SSH are reached, and ssh-keygen",
        content: PackageContent::Programs(&["ssh", "ssh-keygen"]),
        first_needed_by: Purpose::Test,
    },
    Package {
        name: "vsftpd",
        reason: "an FTP server, as a home of another kind",
        content: PackageContent::Programs(&["vsftpd"]),
        first_needed_by: Purpose::Test,
    },
    Package {
        name: "python3-pyftpdlib",
        reason: "another FTP server, which speaks the newer commands",
        content: PackageContent::File("/usr/lib/python3/dist-packages/pyftpdlib/__main__.py"),
        first_needed_by: Purpose::Test,
    },
    Package {
        name: "chromium",
        reason: "a browser, in which the page of runs is tested",
        content: PackageContent::Programs(&["chromium"]),
        first_needed_by: Purpose::BatchSystems,
    },
    Package {
        name: "python3-pip",
        reason: "a program that must work on a mount: many small files, renames",
        content: PackageContent::Programs(&["pip3"]),
        first_needed_by: Purpose::Test,
    },
    Package {
        name: "rsync",
        reason: "a program that must work on a mount: links, attributes, renames",
        content: PackageContent::Programs(&["rsync"]),
        first_needed_by: Purpose::Test,
    },
    Package {
        name: "samtools",
        reason: "a program that must work on a mount: many seeks, indices",
        content: PackageContent::Programs(&["samtools"]),
        first_needed_by: Purpose::Test,
    },
    Package {
        name: "bwa",
        reason: "the aligner of an example workflow",
        content: PackageContent::Programs(&["bwa"]),
        first_needed_by: Purpose::Test,
    },
    Package {
        name: "hmmer",
        reason: "hmmbuild, hmmpress and hmmscan, the programs of an example workflow",
        content: PackageContent::Programs(&["hmmbuild", "hmmpress", "hmmscan"]),
        first_needed_by: Purpose::Test,
    },
    Package {
        name: "hdf5-tools",
        reason: "a program that must work on a mount: one file with many parts",
        content: PackageContent::Programs(&["h5repack"]),
        first_needed_by: Purpose::Test,
    },
    Package {
        name: "netcdf-bin",
        reason: "a program that must work on a mount: files of arrays",
        content: PackageContent::Programs(&["ncgen"]),
        first_needed_by: Purpose::Test,
    },
    Package {
        name: "fio",
        reason: "reads and writes in known patterns, to compare file systems",
        content: PackageContent::Programs(&["fio"]),
        first_needed_by: Purpose::Bench,
    },
    Package {
        name: "slurmctld",
        reason: "the controller of Slurm, on which pilots and burst buffers are tested",
        content: PackageContent::Programs(&["slurmctld"]),
        first_needed_by: Purpose::BatchSystems,
    },
    Package {
        name: "slurmd",
        reason: "the node daemon of Slurm",
        content: PackageContent::Programs(&["slurmd"]),
        first_needed_by: Purpose::BatchSystems,
    },
    Package {
        name: "slurm-client",
        reason: "the commands of Slurm",
        content: PackageContent::Programs(&["sbatch", "squeue", "scancel"]),
        first_needed_by: Purpose::BatchSystems,
    },
    Package {
        name: "munge",
        reason: "the authentication of Slurm",
        content: PackageContent::Programs(&["munged"]),
        first_needed_by: Purpose::BatchSystems,
    },
    Package {
        name: "gridengine-master",
        reason: "the master of Grid Engine, on which pilots are tested",
        content: PackageContent::Programs(&["sge_qmaster"]),
        first_needed_by: Purpose::BatchSystems,
    },
    Package {
        name: "gridengine-exec",
        reason: "the node daemon of Grid Engine",
        content: PackageContent::Programs(&["sge_execd"]),
        first_needed_by: Purpose::BatchSystems,
    },
    Package {
        name: "gridengine-client",
        reason: "the commands of Grid Engine",
        content: PackageContent::Programs(&["qsub", "qstat", "qdel"]),
        first_needed_by: Purpose::BatchSystems,
    },
    Package {
        name: "glusterfs-server",
        reason: "GlusterFS, a file system to compare with",
        content: PackageContent::Programs(&["glusterd", "gluster", "glusterfs"]),
        first_needed_by: Purpose::Peers,
    },
    Package {
        name: "moosefs-master",
        reason: "MooseFS, a file system to compare with",
        content: PackageContent::Programs(&["mfsmaster"]),
        first_needed_by: Purpose::Peers,
    },
    Package {
        name: "moosefs-chunkserver",
        reason: "the part of MooseFS that stores",
        content: PackageContent::Programs(&["mfschunkserver"]),
        first_needed_by: Purpose::Peers,
    },
    Package {
        name: "moosefs-client",
        reason: "the part of MooseFS that mounts",
        content: PackageContent::Programs(&["mfsmount", "mfssetgoal"]),
        first_needed_by: Purpose::Peers,
    },
    Package {
        name: "sshfs",
        reason: "a file system to compare with",
        content: PackageContent::Programs(&["sshfs"]),
        first_needed_by: Purpose::Peers,
    },
    Package {
        name: "rclone",
        reason: "a file system to compare with",
        content: PackageContent::Programs(&["rclone"]),
        first_needed_by: Purpose::Peers,
    },
    Package {
        name: "openssh-server",
        reason: "the server of sshfs and rclone",
        content: PackageContent::Programs(&["sshd"]),
        first_needed_by: Purpose::Peers,
    },
];

/// Makes sure that everything for this purpose is installed, or fails and says what to do.
pub(crate) fn ensure_packages(purpose: Purpose) -> Result<()> {
    let missing = find_missing(purpose);
    if missing.is_empty() {
        println!("setup: every system package that this needs is there");
        return Ok(());
    }
    println!("setup: missing on this machine:");
    for package in &missing {
        println!("  {:16} {}", package.name, package.reason);
    }
    let names: Vec<&str> = missing.iter().map(|package| package.name).collect();
    if !shell::has_program("apt-get") {
        bail!(
            "this machine has no apt-get; install what the list above names \
             (these are Debian's package names) and run the command again"
        );
    }
    if !shell::is_root() {
        bail!(
            "installing needs root; run this, then the command again:\n\n  {}\n",
            manual_command(&names)
        );
    }
    let _services = (purpose == Purpose::BatchSystems)
        .then(ServiceBlock::create)
        .transpose()?;
    install_packages(&names)?;
    let still_missing: Vec<_> = find_missing(purpose)
        .iter()
        .map(|package| package.name)
        .collect();
    if !still_missing.is_empty() {
        bail!(
            "apt-get succeeded, but these did not bring what they should: {}",
            still_missing.join(" ")
        );
    }
    println!("setup: installed {}", names.join(" "));
    Ok(())
}

/// Installs what can be had for this purpose, and goes on without the rest: tests that need it skip
/// themselves aloud.
pub(crate) fn offer_packages(purpose: Purpose) {
    if let Err(error) = ensure_packages(purpose) {
        println!("setup: {error:#}\nsetup: going on without these packages");
    }
}

/// Debian's switch by which packages do not start their services, as long as this value lives.
struct ServiceBlock {
    /// Nothing where the machine has such a policy of its own.
    policy: Option<&'static Path>,
}

impl ServiceBlock {
    fn create() -> Result<Self> {
        let path = Path::new("/usr/sbin/policy-rc.d");
        if path.exists() {
            return Ok(Self { policy: None });
        }
        fs::write(path, "#!/bin/sh\nexit 101\n")?;
        fs::set_permissions(path, Permissions::from_mode(0o755))?;
        Ok(Self { policy: Some(path) })
    }
}

impl Drop for ServiceBlock {
    fn drop(&mut self) {
        if let Some(path) = self.policy {
            let _ = fs::remove_file(path);
        }
    }
}

fn find_missing(purpose: Purpose) -> Vec<&'static Package> {
    PACKAGES
        .iter()
        .filter(|package| package.first_needed_by <= purpose)
        .filter(|package| !is_installed(&package.content))
        .collect()
}

fn is_installed(gives: &PackageContent) -> bool {
    match gives {
        PackageContent::Programs(names) => names.iter().all(|name| shell::has_program(name)),
        PackageContent::File(path) => Path::new(path).is_file(),
    }
}

/// The line to type for those who are not root.
fn manual_command(names: &[&str]) -> String {
    format!(
        "sudo apt-get update && sudo apt-get {}",
        apt_arguments(names).join(" ")
    )
}

fn install_packages(names: &[&str]) -> Result<()> {
    let known = names.iter().all(|name| is_available(name));
    if !known {
        update_package_lists();
    }
    let mut installed = shell::run_command(&mut apt_command(&apt_arguments(names)));
    if installed.is_err() && known {
        // A list from long ago names versions that the mirrors no longer have.
        update_package_lists();
        installed = shell::run_command(&mut apt_command(&apt_arguments(names)));
    }
    installed.map_err(|error| {
        error.context(format!(
            "system packages could not be installed. If this machine has no network, install them \
             from another source and run the command again; with a network, this shows more:\n\n  \
             {}\n",
            manual_command(names)
        ))
    })
}

/// Fetches the package lists. A failure shows itself in the installation that follows.
fn update_package_lists() {
    if let Err(error) = shell::run_command(&mut apt_command(&["update".into()])) {
        println!("setup: {error:#}; trying with the package lists that are here");
    }
}

fn apt_arguments(names: &[&str]) -> Vec<String> {
    let mut arguments = vec![
        "install".to_owned(),
        "--yes".to_owned(),
        "--no-install-recommends".to_owned(),
        // Brings back files of a package that is installed without them.
        "--reinstall".to_owned(),
    ];
    if names.contains(&"hmmer-examples") {
        // Slim images leave out /usr/share/doc, and this package has its sequences there.
        arguments.push("--option".to_owned());
        arguments.push("DPkg::Options::=--path-include=/usr/share/doc/hmmer/*".to_owned());
    }
    arguments.extend(names.iter().map(|&name| name.to_owned()));
    arguments
}

fn apt_command(arguments: &[String]) -> Command {
    let mut command = Command::new("apt-get");
    command
        .args(["--quiet", "--quiet", "--option", "DPkg::Lock::Timeout=120"])
        .args(arguments)
        .env("DEBIAN_FRONTEND", "noninteractive")
        .stdin(Stdio::null());
    command
}

fn is_available(name: &str) -> bool {
    let mut command = Command::new("apt-cache");
    command.args(["policy", name]).env("LC_ALL", "C");
    shell::run_for_output(&mut command).is_ok_and(|policy| has_candidate(&policy))
}

/// Whether `apt-cache policy` knows a version that could be installed.
fn has_candidate(policy: &str) -> bool {
    let candidate = policy
        .lines()
        .find_map(|line| line.trim().strip_prefix("Candidate:"));
    candidate.is_some_and(|version| version.trim() != "(none)")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn package_without_a_candidate_is_unknown() {
        assert!(has_candidate(
            "fuse3:\n  Installed: (none)\n  Candidate: 3.14.0-4\n"
        ));
        assert!(!has_candidate(
            "fuse3:\n  Installed: (none)\n  Candidate: (none)\n"
        ));
        assert!(!has_candidate(""));
    }

    #[test]
    fn install_command_names_the_packages() {
        let line = manual_command(&["attr", "fuse3"]);
        assert!(
            line.starts_with("sudo apt-get update && sudo apt-get install "),
            "{line}"
        );
        assert!(line.ends_with(" attr fuse3"), "{line}");
        assert!(!line.contains("path-include"), "{line}");
    }

    #[test]
    fn install_command_keeps_sequences_in_slim_images() {
        assert!(
            manual_command(&["hmmer-examples"]).contains("path-include=/usr/share/doc/hmmer/*")
        );
    }

    #[test]
    fn demo_needs_fewer_packages_than_the_tests() {
        let demo = PACKAGES
            .iter()
            .filter(|p| p.first_needed_by == Purpose::Demo)
            .count();
        assert!(demo > 0 && demo < PACKAGES.len());
    }
}
