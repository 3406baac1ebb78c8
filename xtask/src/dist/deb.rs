//! The Debian package: program, units, manual pages, completions, mount helper. dpkg-deb builds it
//! from a directory, so it needs no tool beyond dpkg, and takes any program.

use std::fs::{self, Permissions};
use std::io::Write;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::shell;

/// Files of the checkout and where they go. Those that end with `/` are directories.
const FILES: &[(&str, &str)] = &[
    ("packaging/systemd/system/", "usr/lib/systemd/system/"),
    ("packaging/systemd/user/", "usr/lib/systemd/user/"),
    ("packaging/copyright", "usr/share/doc/bafs/copyright"),
    (
        "packaging/bafs.toml",
        "usr/share/doc/bafs/examples/bafs.toml",
    ),
    ("LICENSE-MIT", "usr/share/doc/bafs/LICENSE-MIT"),
    ("LICENSE-APACHE", "usr/share/doc/bafs/LICENSE-APACHE"),
    ("CHANGELOG.md", "usr/share/doc/bafs/CHANGELOG.md"),
    ("integrations/slurm/", "usr/share/bafs/slurm/"),
];

/// Shells with the files in which they look for completions.
const COMPLETIONS: &[(&str, &str)] = &[
    ("bash", "usr/share/bash-completion/completions/bafs"),
    ("zsh", "usr/share/zsh/vendor-completions/_bafs"),
    ("fish", "usr/share/fish/vendor_completions.d/bafs.fish"),
];

/// Files without which the package is of no use.
const REQUIRED: &[&str] = &[
    "usr/bin/bafs",
    "usr/sbin/mount.bafs",
    "usr/lib/systemd/system/bafs-node.service",
    "usr/lib/systemd/user/bafs-node.service",
    "usr/share/man/man1/bafs.1.gz",
    "usr/share/man/man1/bafs-node.1.gz",
    "usr/share/bash-completion/completions/bafs",
];

/// Builds the package of a program, and returns its path.
pub(super) fn build_package(
    program: &Path,
    output: &Path,
    compression: &[&str],
) -> Result<PathBuf> {
    let root = output.join("deb-root");
    if root.exists() {
        fs::remove_dir_all(&root)?;
    }
    fill_root(program, &root)?;
    let architecture = shell::run_for_output(Command::new("dpkg").arg("--print-architecture"))?;
    let architecture = architecture.trim();
    let version = env!("CARGO_PKG_VERSION");
    let control = format_control(architecture, super::is_static(program)?, size_kib(&root)?);
    write_file(&root.join("DEBIAN/control"), control.as_bytes(), 0o644)?;
    let package = output.join(format!("bafs_{version}_{architecture}.deb"));
    let mut command = Command::new("dpkg-deb");
    command
        .arg("--root-owner-group")
        .args(compression)
        .arg("--build")
        .arg(&root)
        .arg(&package);
    shell::run_command(&mut command)?;
    fs::remove_dir_all(&root)?;
    Ok(package)
}

fn fill_root(program: &Path, root: &Path) -> Result<()> {
    let content = fs::read(program).with_context(|| format!("read {}", program.display()))?;
    let installed = root.join("usr/bin/bafs");
    write_file(&installed, &content, 0o755)?;
    // mount(8) looks for it there; on machines whose /sbin is not /usr/sbin nothing else does.
    fs::create_dir_all(root.join("usr/sbin"))?;
    symlink("../bin/bafs", root.join("usr/sbin/mount.bafs"))?;
    let checkout = shell::checkout_root();
    for (source, target) in FILES {
        copy_files(&checkout.join(source), &root.join(target))?;
    }
    for (shell_name, target) in COMPLETIONS {
        let mut command = Command::new(&installed);
        let text = shell::run_for_output(command.args(["completions", shell_name]))?;
        write_file(&root.join(target), text.as_bytes(), 0o644)?;
    }
    let pages = root.join("usr/share/man/man1");
    let mut command = Command::new(&installed);
    shell::run_for_output(command.arg("man-pages").arg(&pages))?;
    for entry in fs::read_dir(&pages)? {
        let page = entry?.path();
        let mut command = Command::new("gzip");
        shell::run_for_output(command.args(["-9n"]).arg(&page))?;
    }
    Ok(())
}

/// Copies a file, or the files of a directory. Scripts stay executable.
fn copy_files(source: &Path, target: &Path) -> Result<()> {
    if source.is_dir() {
        for entry in fs::read_dir(source)? {
            let entry = entry?;
            copy_files(&entry.path(), &target.join(entry.file_name()))?;
        }
        return Ok(());
    }
    let mode = fs::metadata(source)?.permissions().mode();
    let mode = if mode & 0o111 == 0 { 0o644 } else { 0o755 };
    write_file(target, &fs::read(source)?, mode)
}

fn write_file(path: &Path, content: &[u8], mode: u32) -> Result<()> {
    let attempt = || format!("write {}", path.display());
    fs::create_dir_all(path.parent().unwrap_or(path)).with_context(attempt)?;
    let mut file = fs::File::create(path).with_context(attempt)?;
    file.write_all(content).with_context(attempt)?;
    fs::set_permissions(path, Permissions::from_mode(mode)).with_context(attempt)
}

fn size_kib(root: &Path) -> Result<u64> {
    let sizes = shell::run_for_output(Command::new("du").args(["-sk"]).arg(root))?;
    let first = sizes
        .split_whitespace()
        .next()
        .context("du prints a size")?;
    Ok(first.parse()?)
}

fn format_control(architecture: &str, is_static: bool, size_kib: u64) -> String {
    // A program that is linked with shared libraries runs where it was built.
    let depends = if is_static { "" } else { "Depends: libc6\n" };
    format!(
        "Package: bafs\nVersion: {}\nArchitecture: {architecture}\n\
         Maintainer: The BAFS developers <bafs@localhost>\nInstalled-Size: {size_kib}\n\
         {depends}Recommends: fuse3\nSection: admin\nPriority: optional\n\
         Description: distributed file system for batch jobs\n \
         BAFS gives each job of a workflow a private name space of volumes: scratch volumes\n \
         for intermediate files, cooperative caches for shared inputs.\n",
        env!("CARGO_PKG_VERSION")
    )
}

/// Installs the package into an empty directory by dpkg, and looks at what is there.
pub(super) fn check_package(package: &Path, output: &Path) -> Result<()> {
    let root = output.join("deb-trial");
    if root.exists() {
        fs::remove_dir_all(&root)?;
    }
    for directory in ["info", "updates", "triggers"] {
        fs::create_dir_all(root.join("var/lib/dpkg").join(directory))?;
    }
    fs::write(root.join("var/lib/dpkg/status"), "")?;
    let mut install = Command::new("dpkg");
    install
        .arg(format!("--root={}", root.display()))
        .args([
            "--force-depends",
            "--force-not-root",
            "--force-script-chrootless",
            "--install",
        ])
        .arg(package)
        .stdout(Stdio::null());
    shell::run_command(&mut install)?;
    for path in REQUIRED {
        ensure!(root.join(path).exists(), "the package lacks {path}");
    }
    let mut version = Command::new(root.join("usr/bin/bafs"));
    let version = shell::run_for_output(version.arg("--version"))?;
    let expected = env!("CARGO_PKG_VERSION");
    ensure!(
        version.contains(expected),
        "the installed program says {version}"
    );
    verify_units(&root)?;
    Ok(fs::remove_dir_all(root)?)
}

/// Lets systemd read the units, if it is there.
fn verify_units(root: &Path) -> Result<()> {
    if !shell::has_program("systemd-analyze") {
        println!("dist: units are NOT VERIFIED: there is no systemd-analyze");
        return Ok(());
    }
    for kind in ["system", "user"] {
        for name in ["bafs-node", "bafs-home", "bafs-catalog"] {
            let unit = format!("/usr/lib/systemd/{kind}/{name}.service");
            let mut command = Command::new("systemd-analyze");
            command.arg("verify").arg("--man=no");
            if kind == "user" {
                command.arg("--user");
            }
            // Without its programs below this root, a unit would fail for those of the host.
            let text = fs::read_to_string(root.join(unit.trim_start_matches('/')))?;
            let program = root.join("usr/bin/bafs");
            let text = text.replace("/usr/bin/bafs", &program.to_string_lossy());
            let copy = root.join(format!("{name}.service"));
            fs::write(&copy, text)?;
            let output = command
                .arg(&copy)
                .output()
                .context("start systemd-analyze")?;
            let said = String::from_utf8_lossy(&output.stderr);
            let is_about_us = said.lines().any(|line| line.contains(name));
            ensure!(!is_about_us, "{unit}: {said}");
            fs::remove_file(copy)?;
        }
    }
    Ok(())
}
