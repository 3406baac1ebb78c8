//! The file of a profile: one trace in each line, as JSON.

use std::io::{BufRead, BufReader, BufWriter, ErrorKind, Write};
use std::path::Path;

use anyhow::{Context, Result};
use bafs_profile::trace::Trace;

use crate::input_file::open_regular;

/// The traces of a profile; none if there is no such file.
pub(super) fn read_traces(path: &Path) -> Result<Vec<Trace>> {
    match path.metadata() {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        _ => {}
    }
    let lines = BufReader::new(open_regular(path)?).lines();
    let parse = |(at, line): (usize, std::io::Result<String>)| {
        let shown = path.display();
        let line = line.with_context(|| format!("cannot read {shown}"))?;
        serde_json::from_str(&line).with_context(|| {
            let number = at + 1;
            format!("{shown}: line {number} is no trace; name a profile, or use --new")
        })
    };
    lines.enumerate().map(parse).collect()
}

/// Replaces a profile as a whole.
pub(super) fn write_traces(path: &Path, traces: &[Trace]) -> Result<()> {
    let failed = || format!("cannot write {}", path.display());
    let directory = match path.parent() {
        Some(directory) if !directory.as_os_str().is_empty() => directory,
        _ => Path::new("."),
    };
    let new = tempfile::NamedTempFile::new_in(directory).with_context(failed)?;
    let mut writer = BufWriter::new(new);
    for trace in traces {
        serde_json::to_writer(&mut writer, trace).with_context(failed)?;
        writer.write_all(b"\n").with_context(failed)?;
    }
    let new = writer
        .into_inner()
        .map_err(|error| error.into_error())
        .with_context(failed)?;
    new.persist(path)
        .map_err(|error| error.error)
        .with_context(failed)?;
    Ok(())
}
