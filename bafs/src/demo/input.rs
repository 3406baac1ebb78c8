//! The demo's input: a real protein database, enlarged from real sequences by seeded mutation.

use std::fs;
use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result, bail};
use tokio::process::Command;

/// Real protein sequences of the Debian package `hmmer-examples`.
const SEQUENCE_DIRECTORY: &str = "/usr/share/doc/hmmer/examples";
const GLOBINS_FILE: &str = "tutorial/globins45.fa";
const FAMILY_FILE: &str = "easel/demotic/examples/example-single.fa.gz";

/// One record in so many keeps a family resemblance; the others are shuffled beyond it, as most
/// of a real database is unrelated to a query.
const RELATED_INTERVAL: u64 = 50;

/// Residues that a related record changes, in percent.
const RELATED_CHANGED_PERCENT: u64 = 30;

/// Residues in a line of FASTA.
const LINE_RESIDUES: usize = 60;

/// A small generator of reproducible numbers (SplitMix64; Steele, Lea, Flood 2014).
#[derive(Debug, Clone)]
struct SeededRng(u64);

impl SeededRng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.next() % (bound.max(1) as u64)).unwrap_or(0)
    }
}

/// Writes `db/` (a BLAST database of at least `residues` residues) and `queries/` with `queries`
/// files below `home`. Must be called within a runtime of several threads.
///
/// # Errors
/// Sequences or programs that are not installed, I/O errors.
pub async fn prepare_input(home: &Path, residues: usize, queries: u32, seed: u64) -> Result<()> {
    let sequences = read_real_sequences().await?;
    for directory in ["db", "queries"] {
        fs::create_dir_all(home.join(directory))?;
    }
    for query in 0..queries {
        let text = format_fasta(
            &format!("query{:02}", query + 1),
            pick_query(&sequences, query),
        );
        fs::write(home.join(format!("queries/q{:02}.fa", query + 1)), text)?;
    }
    let source = home.join("proteins.fa");
    tokio::task::block_in_place(|| write_enlarged(&source, &sequences, residues, seed))?;
    let made = Command::new("makeblastdb")
        .args(["-dbtype", "prot", "-title", "demo", "-in"])
        .arg(&source)
        .arg("-out")
        .arg(home.join("db/proteins"))
        .kill_on_drop(true)
        .output()
        .await
        .context("cannot run makeblastdb; apt-get install ncbi-blast+")?;
    if !made.status.success() {
        bail!(
            "makeblastdb failed: {}",
            String::from_utf8_lossy(&made.stderr)
        );
    }
    fs::remove_file(source)?;
    Ok(())
}

/// Queries are spread over the real sequences; 13 has no factor in common with their number.
fn pick_query(sequences: &[Vec<u8>], query: u32) -> &[u8] {
    &sequences[(query as usize * 13) % sequences.len()]
}

async fn read_real_sequences() -> Result<Vec<Vec<u8>>> {
    let missing =
        || format!("no protein sequences in {SEQUENCE_DIRECTORY}; apt-get install hmmer-examples");
    let mut text =
        fs::read(Path::new(SEQUENCE_DIRECTORY).join(GLOBINS_FILE)).with_context(missing)?;
    let family = Command::new("gzip")
        .arg("-dc")
        .arg(Path::new(SEQUENCE_DIRECTORY).join(FAMILY_FILE))
        .output()
        .await
        .context("cannot run gzip")?;
    text.extend(family.stdout);
    let sequences = parse_fasta(&text);
    if sequences.is_empty() {
        bail!(missing());
    }
    Ok(sequences)
}

fn parse_fasta(text: &[u8]) -> Vec<Vec<u8>> {
    let mut sequences: Vec<Vec<u8>> = Vec::new();
    for line in text.split(|byte| *byte == b'\n') {
        match (line.first(), sequences.last_mut()) {
            (Some(b'>'), _) => sequences.push(Vec::new()),
            (Some(_), Some(sequence)) => sequence.extend(line.trim_ascii()),
            _ => {}
        }
    }
    sequences.retain(|sequence| !sequence.is_empty());
    sequences
}

fn write_enlarged(path: &Path, real: &[Vec<u8>], residues: usize, seed: u64) -> Result<()> {
    let background = real.concat();
    let mut numbers = SeededRng(seed);
    let mut file = std::io::BufWriter::new(fs::File::create(path)?);
    let (mut written, mut record) = (0, 0);
    while written < residues {
        let model = &real[numbers.below(real.len())];
        let related = numbers.next().is_multiple_of(RELATED_INTERVAL);
        let changed_percent = if related {
            RELATED_CHANGED_PERCENT
        } else {
            100
        };
        let sequence: Vec<u8> = model
            .iter()
            .map(|&residue| match numbers.next() % 100 < changed_percent {
                true => background[numbers.below(background.len())],
                false => residue,
            })
            .collect();
        file.write_all(&format_fasta(
            &format!("demo{record:07} changed {changed_percent} %"),
            &sequence,
        ))?;
        written += sequence.len();
        record += 1;
    }
    Ok(file.flush()?)
}

fn format_fasta(title: &str, sequence: &[u8]) -> Vec<u8> {
    let mut text = format!(">{title}\n").into_bytes();
    for line in sequence.chunks(LINE_RESIDUES) {
        text.extend(line);
        text.push(b'\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_gives_the_same_bytes() {
        let real = parse_fasta(b">a\nMKV\nLLA\n>b\nGGH\n");
        assert_eq!(real, [b"MKVLLA".to_vec(), b"GGH".to_vec()]);
        let directory = tempfile::tempdir().expect("directory");
        let write = |name: &str, seed| {
            let path = directory.path().join(name);
            write_enlarged(&path, &real, 5_000, seed).expect("write");
            fs::read(path).expect("read")
        };
        assert_eq!(write("one", 7), write("two", 7));
        assert_ne!(write("one", 7), write("three", 8));
    }
}
