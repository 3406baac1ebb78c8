//! Root directories for jobs: programs of this machine with their libraries, and nothing else.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::{find_tool, printed_text};

/// Makes a root with a shell and some programs.
///
/// # Errors
/// A program is not on this machine, or an I/O error.
pub fn create_image(image: &Path, programs: &[&str]) -> Result<()> {
    for program in ["sh"].iter().chain(programs) {
        let path = find_tool(program).with_context(|| format!("there is no {program}"))?;
        copy_with_libraries(&path, image)?;
    }
    let shell = image.join("bin/sh");
    if !shell.exists() {
        fs::create_dir_all(image.join("bin"))?;
        fs::copy("/bin/sh", shell)?;
    }
    for directory in ["dev", "proc", "sys", "tmp", "var/tmp", "etc"] {
        fs::create_dir_all(image.join(directory))?;
    }
    Ok(())
}

/// Copies a program, and the libraries that it loads at its start, to where they are.
///
/// # Errors
/// An I/O error.
pub fn copy_with_libraries(program: &Path, image: &Path) -> Result<()> {
    let listed = Command::new("ldd").arg(program).output()?;
    ensure!(listed.status.success(), printed_text(&listed));
    let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
    let words = listed.split_whitespace();
    let libraries = words.filter(|word| word.starts_with('/')).map(Path::new);
    for file in libraries.chain([program]) {
        copy_file(file, image)?;
    }
    Ok(())
}

/// Copies a file to where it is, with the links on the way to it.
fn copy_file(file: &Path, image: &Path) -> Result<()> {
    let place = |path: &Path| image.join(path.strip_prefix("/").unwrap_or(path));
    let to = place(file);
    fs::create_dir_all(to.parent().context("a file has a directory")?)?;
    if to.symlink_metadata().is_ok() {
        return Ok(());
    }
    let real = file.canonicalize()?;
    let name = real.file_name() != file.file_name();
    if name && file.is_symlink() {
        // A program may look at the name by which it was called.
        let target = fs::read_link(file)?;
        let target = file.parent().unwrap_or(file).join(target);
        copy_file(&target, image)?;
        symlink(&target, &to)?;
        return Ok(());
    }
    fs::copy(&real, &to).with_context(|| real.display().to_string())?;
    Ok(())
}
