//! System packages: finds what is missing, installs it when it may, otherwise says how.
//! Downloads nothing but packages of the system's own registry.

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
    /// To compare with other network file systems in `bench datapath`. Nothing asks for it by
    /// itself: these packages start services.
    Peers,
}

/// How to see that a package is there: by what it gives, so that other ways to install it count.
enum Gives {
    Programs(&'static [&'static str]),
    File(&'static str),
}

struct Package {
    name: &'static str,
    why: &'static str,
    gives: Gives,
    first_needed_by: Purpose,
}

/// Real protein sequences that the demo's database grows from.
const SEQUENCES: &str = "/usr/share/doc/hmmer/examples/tutorial/globins45.fa";

const PACKAGES: &[Package] = &[
    Package {
        name: "build-essential",
        why: "a C compiler and linker, to build the dependencies",
        gives: Gives::Programs(&["cc", "make"]),
        first_needed_by: Purpose::Demo,
    },
    Package {
        name: "ncbi-blast+",
        why: "blastp and makeblastdb, the unmodified programs of the main job",
        gives: Gives::Programs(&["blastp", "makeblastdb"]),
        first_needed_by: Purpose::Demo,
    },
    Package {
        name: "hmmer-examples",
        why: "real protein sequences, from which the demo's database is made",
        gives: Gives::File(SEQUENCES),
        first_needed_by: Purpose::Demo,
    },
    Package {
        name: "fuse3",
        why: "fusermount3, by which an ordinary user mounts",
        gives: Gives::Programs(&["fusermount3"]),
        first_needed_by: Purpose::Demo,
    },
    Package {
        name: "mawk",
        why: "awk, for the second stage of the main job",
        gives: Gives::Programs(&["awk"]),
        first_needed_by: Purpose::Demo,
    },
    Package {
        name: "util-linux",
        why: "unshare, setpriv and findmnt, to make name spaces and look into them",
        gives: Gives::Programs(&["unshare", "setpriv", "findmnt"]),
        first_needed_by: Purpose::Test,
    },
    Package {
        name: "iproute2",
        why: "ip and tc, to make several hosts on one machine",
        gives: Gives::Programs(&["ip", "tc"]),
        first_needed_by: Purpose::Test,
    },
    Package {
        name: "nftables",
        why: "nft, to cut servers off from each other in a network of their own",
        gives: Gives::Programs(&["nft"]),
        first_needed_by: Purpose::Test,
    },
    Package {
        name: "procps",
        why: "ps and pgrep, to see that no process is left behind",
        gives: Gives::Programs(&["ps", "pgrep"]),
        first_needed_by: Purpose::Test,
    },
    Package {
        name: "openmpi-bin",
        why: "mpirun, whose sessions of several jobs must not meet",
        gives: Gives::Programs(&["mpirun"]),
        first_needed_by: Purpose::Test,
    },
    Package {
        name: "git",
        why: "a program that must work on a mount",
        gives: Gives::Programs(&["git"]),
        first_needed_by: Purpose::Test,
    },
    Package {
        name: "sqlite3",
        why: "a program that must work on a mount: locks, mmap, fsync",
        gives: Gives::Programs(&["sqlite3"]),
        first_needed_by: Purpose::Test,
    },
    Package {
        name: "attr",
        why: "getfattr and setfattr, for extended attributes on a mount",
        gives: Gives::Programs(&["getfattr", "setfattr"]),
        first_needed_by: Purpose::Test,
    },
    Package {
        name: "libacl1-dev",
        why: "a library that the test suite pjdfstest is linked with",
        gives: Gives::File("/usr/include/sys/acl.h"),
        first_needed_by: Purpose::Test,
    },
    Package {
        name: "nginx-light",
        why: "a web server, as a home of another kind",
        gives: Gives::Programs(&["nginx"]),
        first_needed_by: Purpose::Test,
    },
    Package {
        name: "prometheus",
        why: "to see that it understands the metrics",
        gives: Gives::Programs(&["prometheus", "promtool"]),
        first_needed_by: Purpose::Test,
    },
    Package {
        name: "openssl",
        why: "a certificate for that web server",
        gives: Gives::Programs(&["openssl"]),
        first_needed_by: Purpose::Test,
    },
    Package {
        name: "openssh-server",
        why: "sshd, as a home of another kind",
        gives: Gives::Programs(&["sshd"]),
        first_needed_by: Purpose::Test,
    },
    Package {
        name: "openssh-client",
        why: "ssh, by which homes behind SSH are reached, and ssh-keygen",
        gives: Gives::Programs(&["ssh", "ssh-keygen"]),
        first_needed_by: Purpose::Test,
    },
    Package {
        name: "vsftpd",
        why: "an FTP server, as a home of another kind",
        gives: Gives::Programs(&["vsftpd"]),
        first_needed_by: Purpose::Test,
    },
    Package {
        name: "python3-pyftpdlib",
        why: "another FTP server, which speaks the newer commands",
        gives: Gives::File("/usr/lib/python3/dist-packages/pyftpdlib/__main__.py"),
        first_needed_by: Purpose::Test,
    },
    Package {
        name: "python3-pip",
        why: "a program that must work on a mount: many small files, renames",
        gives: Gives::Programs(&["pip3"]),
        first_needed_by: Purpose::Test,
    },
    Package {
        name: "rsync",
        why: "a program that must work on a mount: links, attributes, renames",
        gives: Gives::Programs(&["rsync"]),
        first_needed_by: Purpose::Test,
    },
    Package {
        name: "samtools",
        why: "a program that must work on a mount: many seeks, indices",
        gives: Gives::Programs(&["samtools"]),
        first_needed_by: Purpose::Test,
    },
    Package {
        name: "hdf5-tools",
        why: "a program that must work on a mount: one file with many parts",
        gives: Gives::Programs(&["h5repack"]),
        first_needed_by: Purpose::Test,
    },
    Package {
        name: "netcdf-bin",
        why: "a program that must work on a mount: files of arrays",
        gives: Gives::Programs(&["ncgen"]),
        first_needed_by: Purpose::Test,
    },
    Package {
        name: "fio",
        why: "reads and writes in known patterns, to compare file systems",
        gives: Gives::Programs(&["fio"]),
        first_needed_by: Purpose::Bench,
    },
    Package {
        name: "glusterfs-server",
        why: "GlusterFS, a file system to compare with",
        gives: Gives::Programs(&["glusterd", "gluster", "glusterfs"]),
        first_needed_by: Purpose::Peers,
    },
    Package {
        name: "moosefs-master",
        why: "MooseFS, a file system to compare with",
        gives: Gives::Programs(&["mfsmaster"]),
        first_needed_by: Purpose::Peers,
    },
    Package {
        name: "moosefs-chunkserver",
        why: "the part of MooseFS that stores",
        gives: Gives::Programs(&["mfschunkserver"]),
        first_needed_by: Purpose::Peers,
    },
    Package {
        name: "moosefs-client",
        why: "the part of MooseFS that mounts",
        gives: Gives::Programs(&["mfsmount", "mfssetgoal"]),
        first_needed_by: Purpose::Peers,
    },
    Package {
        name: "sshfs",
        why: "a file system to compare with",
        gives: Gives::Programs(&["sshfs"]),
        first_needed_by: Purpose::Peers,
    },
    Package {
        name: "openssh-server",
        why: "the server of sshfs",
        gives: Gives::Programs(&["sshd"]),
        first_needed_by: Purpose::Peers,
    },
];

/// Makes sure that everything for this purpose is installed, or fails and says what to do.
pub(crate) fn ensure(purpose: Purpose) -> Result<()> {
    let missing = missing_for(purpose);
    if missing.is_empty() {
        println!("setup: every system package that this needs is there");
        return Ok(());
    }
    println!("setup: missing on this machine:");
    for package in &missing {
        println!("  {:16} {}", package.name, package.why);
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
            by_hand(&names)
        );
    }
    install(&names)?;
    let still_missing: Vec<_> = missing_for(purpose)
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

fn missing_for(purpose: Purpose) -> Vec<&'static Package> {
    PACKAGES
        .iter()
        .filter(|package| package.first_needed_by <= purpose)
        .filter(|package| !is_there(&package.gives))
        .collect()
}

fn is_there(gives: &Gives) -> bool {
    match gives {
        Gives::Programs(names) => names.iter().all(|name| shell::has_program(name)),
        Gives::File(path) => Path::new(path).is_file(),
    }
}

/// The line to type for those who are not root.
fn by_hand(names: &[&str]) -> String {
    format!(
        "sudo apt-get update && sudo apt-get {}",
        apt_arguments(names).join(" ")
    )
}

fn install(names: &[&str]) -> Result<()> {
    let known = names.iter().all(|name| is_known(name));
    if !known {
        update();
    }
    let mut installed = shell::run(&mut apt_get(&apt_arguments(names)));
    if installed.is_err() && known {
        // A list from long ago names versions that the mirrors no longer have.
        update();
        installed = shell::run(&mut apt_get(&apt_arguments(names)));
    }
    installed.map_err(|error| {
        error.context(format!(
            "system packages could not be installed. If this machine has no network, install them \
             from another source and run the command again; with a network, this shows more:\n\n  \
             {}\n",
            by_hand(names)
        ))
    })
}

/// Fetches the package lists. A failure shows itself in the installation that follows.
fn update() {
    if let Err(error) = shell::run(&mut apt_get(&["update".into()])) {
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

fn apt_get(arguments: &[String]) -> Command {
    let mut command = Command::new("apt-get");
    command
        .args(["--quiet", "--quiet", "--option", "DPkg::Lock::Timeout=120"])
        .args(arguments)
        .env("DEBIAN_FRONTEND", "noninteractive")
        .stdin(Stdio::null());
    command
}

fn is_known(name: &str) -> bool {
    let mut command = Command::new("apt-cache");
    command.args(["policy", name]).env("LC_ALL", "C");
    shell::output(&mut command).is_ok_and(|policy| has_candidate(&policy))
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
    fn a_package_without_a_version_is_not_known() {
        assert!(has_candidate(
            "fuse3:\n  Installed: (none)\n  Candidate: 3.14.0-4\n"
        ));
        assert!(!has_candidate(
            "fuse3:\n  Installed: (none)\n  Candidate: (none)\n"
        ));
        assert!(!has_candidate(""));
    }

    #[test]
    fn the_line_to_type_names_the_packages() {
        let line = by_hand(&["attr", "fuse3"]);
        assert!(
            line.starts_with("sudo apt-get update && sudo apt-get install "),
            "{line}"
        );
        assert!(line.ends_with(" attr fuse3"), "{line}");
        assert!(!line.contains("path-include"), "{line}");
    }

    #[test]
    fn slim_images_keep_the_sequences() {
        assert!(by_hand(&["hmmer-examples"]).contains("path-include=/usr/share/doc/hmmer/*"));
    }

    #[test]
    fn the_demo_needs_less_than_the_tests() {
        let demo = PACKAGES
            .iter()
            .filter(|p| p.first_needed_by == Purpose::Demo)
            .count();
        assert!(demo > 0 && demo < PACKAGES.len());
    }
}
