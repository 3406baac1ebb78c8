//! An environment as package managers make them: Python with its library, many small files, some
//! large ones. It runs nothing.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::content::Content;
use crate::root_image::{copy_with_libraries, create_image};
use crate::{find_tool, printed_text};

/// Small files of the size of a module, in packages of a hundred.
const SMALL_FILES: u64 = 12_000;
const SMALL_BYTES: u64 = 6_000;
const PACKAGE_FILES: u64 = 100;

/// Large files as those of numerical libraries and models.
const LARGE_FILES: u64 = 12;
const LARGE_BYTES: u64 = 36 << 20;

/// Where the generated packages are.
const PACKAGES: &str = "opt/packages";

/// What is in an environment.
#[derive(Debug, Clone)]
pub(super) struct Environment {
    /// The Python of this machine, at the same place in the environment.
    pub(super) python: PathBuf,
    pub(super) files: u64,
    pub(super) bytes: u64,
}

/// Makes the environment in a directory, a part of it in a quick run.
pub(super) fn create_environment(at: &Path, part: u64) -> Result<Environment> {
    create_image(at, &["cat"])?;
    let python = copy_python(at)?;
    let content = Content::new(44, (LARGE_BYTES / part) as usize);
    for large in 0..LARGE_FILES {
        let path = at.join(PACKAGES).join(format!("large{large}.so"));
        fs::create_dir_all(path.parent().context("it has a parent")?)?;
        content.write_file(&path)?;
    }
    for small in 0..SMALL_FILES / part {
        let package = at
            .join(PACKAGES)
            .join(format!("p{}", small / PACKAGE_FILES));
        fs::create_dir_all(&package)?;
        let line = format!("value_{small} = {small}\n");
        let lines = SMALL_BYTES as usize / line.len();
        fs::write(
            package.join(format!("m{}.py", small % PACKAGE_FILES)),
            line.repeat(lines),
        )?;
    }
    let (files, bytes) = measure(at)?;
    Ok(Environment {
        python,
        files,
        bytes,
    })
}

/// The program of a job: it starts Python, imports a part of its library and of one package, and
/// maps a large file, as a loader does with a library: it touches some places of it.
pub(super) fn job_program(job: u64) -> String {
    let (package, large) = (job % 8, job % 4);
    format!(
        "import sys, json, csv, decimal, hashlib, html.parser, sqlite3, unittest\n\
         sys.path.insert(0, '/{PACKAGES}/p{package}')\n\
         import m1, m2, m3\n\
         import mmap\n\
         file = open('/{PACKAGES}/large{large}.so', 'rb')\n\
         mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)\n\
         places = [mapped[at] for at in range(0, len(mapped), 3_500_000)]\n\
         print(hashlib.sha256(bytes(places)).hexdigest(), m1.__name__)\n"
    )
}

fn copy_python(at: &Path) -> Result<PathBuf> {
    let found = find_tool("python3").context("there is no python3")?;
    let ask = "import sys; print(sys.base_prefix); print(sys.executable); import _sqlite3, _ssl; \
               print(_sqlite3.__file__); print(_ssl.__file__)";
    let told = Command::new(found).args(["-c", ask]).output()?;
    ensure!(told.status.success(), printed_text(&told));
    let told = String::from_utf8(told.stdout)?;
    let mut lines = told.lines();
    let prefix = PathBuf::from(lines.next().context("a prefix")?);
    let program = PathBuf::from(lines.next().context("a program")?).canonicalize()?;
    let library = program.file_name().context("a name")?;
    let library = Path::new("lib").join(library);
    copy_with_libraries(&program, at)?;
    for module in lines {
        copy_with_libraries(Path::new(module), at)?;
    }
    let to = at.join(prefix.join(&library).strip_prefix("/")?);
    fs::create_dir_all(to.parent().context("it has a parent")?)?;
    // With the times of the files, which compiled modules are compared with.
    let copied = Command::new("cp")
        .args(["-a", "-T"])
        .args([prefix.join(&library), to])
        .output()?;
    ensure!(copied.status.success(), printed_text(&copied));
    Ok(program)
}

/// Files and their bytes.
fn measure(directory: &Path) -> Result<(u64, u64)> {
    let (mut files, mut bytes) = (0, 0);
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let found = entry.metadata()?;
        if found.is_dir() {
            let (more_files, more_bytes) = measure(&entry.path())?;
            files += more_files;
            bytes += more_bytes;
        } else {
            files += 1;
            bytes += found.len();
        }
    }
    Ok((files, bytes))
}
