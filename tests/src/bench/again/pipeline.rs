//! The pipeline as a workflow and as a Snakefile, its inputs, and the changes to it.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Result, ensure};

use crate::printed_text;
use crate::seeded_rng::SeededRng;

/// Bases of the genome, read pairs of a sample, and bases of a read.
const GENOME_BASES: usize = 30_000;
const PAIRS: usize = 300;
const READ_BASES: usize = 100;
const INSERT_BASES: usize = 300;

/// Samples at first: with two jobs for the genome, and four for each sample, 26 jobs.
const SAMPLES: u32 = 6;

/// What happens between two runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Change {
    /// A file that a sample's second job reads is taken away.
    Break,
    /// It is back.
    Mend,
    /// Nothing.
    Nothing,
    /// An argument of a sample's third job.
    Argument,
    /// A sample's reads.
    Input,
    /// A sample more.
    Sample,
    /// The script that one job runs.
    Program,
}

/// The pipeline as it is now.
#[derive(Debug)]
pub(super) struct Pipeline {
    samples: u32,
    /// Least mapping quality, of samples that differ from the others.
    qualities: BTreeMap<u32, u32>,
    numbers: SeededRng,
    genome: Vec<u8>,
}

impl Default for Pipeline {
    fn default() -> Self {
        let mut numbers = SeededRng::new(44);
        let genome = (0..GENOME_BASES).map(|_| base(&mut numbers)).collect();
        Self {
            samples: SAMPLES,
            qualities: BTreeMap::new(),
            numbers,
            genome,
        }
    }
}

fn base(numbers: &mut SeededRng) -> u8 {
    b"ACGT"[numbers.next_below(4) as usize]
}

fn complement(base: u8) -> u8 {
    match base {
        b'A' => b'T',
        b'C' => b'G',
        b'G' => b'C',
        _ => b'A',
    }
}

impl Pipeline {
    /// Writes the genome with its index, and the files of all samples, into each home.
    pub(super) fn write_inputs(&mut self, homes: &[&Path; 2]) -> Result<()> {
        let genome = String::from_utf8_lossy(&self.genome).into_owned();
        for home in homes {
            for directory in ["reference", "reads", "regions", "tools"] {
                fs::create_dir_all(home.join(directory))?;
            }
            let reference = home.join("reference/genome.fa");
            fs::write(&reference, format!(">chr1\n{genome}\n"))?;
            let indexed = Command::new("bwa").arg("index").arg(&reference).output()?;
            ensure!(indexed.status.success(), printed_text(&indexed));
        }
        self.write_tool(homes, "samtools dict")?;
        (1..=self.samples).try_for_each(|sample| self.write_sample(sample, homes))
    }

    fn write_tool(&self, homes: &[&Path; 2], command: &str) -> Result<()> {
        for home in homes {
            fs::write(
                home.join("tools/dict.sh"),
                format!("{command} \"$1\" > \"$2\"\n"),
            )?;
        }
        Ok(())
    }

    fn write_sample(&mut self, sample: u32, homes: &[&Path; 2]) -> Result<()> {
        self.write_reads(sample, homes)?;
        write_regions(sample, homes)
    }

    fn write_reads(&mut self, sample: u32, homes: &[&Path; 2]) -> Result<()> {
        let (mut first, mut second) = (String::new(), String::new());
        let quality = "I".repeat(READ_BASES);
        for pair in 0..PAIRS {
            let last = (GENOME_BASES - INSERT_BASES) as u64;
            let start = self.numbers.next_below(last) as usize;
            let insert = &self.genome[start..start + INSERT_BASES];
            let forward = String::from_utf8_lossy(&insert[..READ_BASES]).into_owned();
            let reverse = insert
                .iter()
                .rev()
                .take(READ_BASES)
                .map(|it| complement(*it));
            let reverse: Vec<u8> = reverse.collect();
            let reverse = String::from_utf8_lossy(&reverse);
            let _ = write!(first, "@p{pair}/1\n{forward}\n+\n{quality}\n");
            let _ = write!(second, "@p{pair}/2\n{reverse}\n+\n{quality}\n");
        }
        for home in homes {
            fs::write(home.join(format!("reads/s{sample}_1.fq")), &first)?;
            fs::write(home.join(format!("reads/s{sample}_2.fq")), &second)?;
        }
        Ok(())
    }

    /// Makes a change to the inputs, or to what [`Self::write`] writes next.
    pub(super) fn apply(&mut self, change: Change, homes: &[&Path; 2]) -> Result<()> {
        match change {
            Change::Break => homes.iter().try_for_each(|home| {
                Ok(fs::remove_file(
                    home.join(format!("regions/s{SAMPLES}.bed")),
                )?)
            }),
            Change::Mend => write_regions(SAMPLES, homes),
            Change::Nothing => Ok(()),
            Change::Argument => {
                self.qualities.insert(3, 30);
                Ok(())
            }
            Change::Input => self.write_reads(2, homes),
            Change::Sample => {
                self.samples += 1;
                self.write_sample(self.samples, homes)
            }
            Change::Program => self.write_tool(homes, "samtools dict -a name"),
        }
    }

    /// Writes the workflow into the first home, and the Snakefile into the second.
    pub(super) fn write(&self, [bafs, snakemake]: &[&Path; 2]) -> Result<()> {
        fs::write(bafs.join("test.bafs"), self.workflow())?;
        fs::write(snakemake.join("Snakefile"), self.snakefile())?;
        Ok(())
    }

    /// Names of all results.
    pub(super) fn results(&self) -> Vec<String> {
        let samples = (1..=self.samples).flat_map(|s| [format!("s{s}.bam"), format!("s{s}.txt")]);
        let genome = ["genome.fai", "genome.dict"].map(str::to_owned);
        genome.into_iter().chain(samples).collect()
    }

    fn quality(&self, sample: u32) -> u32 {
        self.qualities.get(&sample).copied().unwrap_or(20)
    }

    fn workflow(&self) -> String {
        let mut text = String::from(
            "volume reference cache bafs://home/reference 2 MB\n\
             volume reads cache bafs://home/reads 4 MB\n\
             volume regions cache bafs://home/regions 1 MB\n\
             volume tools cache bafs://home/tools 1 MB\n\
             volume fai scratch 1 MB\nvolume dict scratch 1 MB\n\
             job faidx {\nexecutable = sh\n\
             arguments = -c \"samtools faidx --fai-idx /fai/genome.fai /ref/genome.fa\"\n}\n\
             mount reference faidx /ref\nmount fai faidx /fai\n\
             extract fai genome.fai bafs://home/out/genome.fai\n\
             job dict {\nexecutable = sh\n\
             arguments = /tools/dict.sh /ref/genome.fa /dict/genome.dict\n}\n\
             mount reference dict /ref\nmount tools dict /tools\nmount dict dict /dict\n\
             extract dict genome.dict bafs://home/out/genome.dict\n",
        );
        for sample in 1..=self.samples {
            text += &self.sample_text(sample);
        }
        text
    }

    fn sample_text(&self, s: u32) -> String {
        let quality = self.quality(s);
        format!(
            "volume aligned{s} scratch 4 MB\nvolume sorted{s} scratch 4 MB\n\
             volume marked{s} scratch 4 MB\nvolume done{s} scratch 4 MB\n\
             job align{s} {{\nexecutable = sh\narguments = -c \"bwa mem -v 1 /ref/genome.fa \
             /reads/s{s}_1.fq /reads/s{s}_2.fq > /out/a.sam\"\n}}\n\
             job sort{s} {{\nexecutable = bash\narguments = -o pipefail -c \"samtools view -b -L \
             /regions/s{s}.bed /in/a.sam | samtools sort -o /out/s.bam -\"\n}}\n\
             job mark{s} {{\nexecutable = sh\n\
             arguments = -c \"samtools view -b -q {quality} -o /out/m.bam /in/s.bam\"\n}}\n\
             job finish{s} {{\nexecutable = sh\n\
             arguments = -c \"cp /in/m.bam /out/r.bam && samtools flagstat /in/m.bam > \
             /out/r.txt\"\n}}\n\
             parent align{s} child sort{s}\nparent sort{s} child mark{s}\n\
             parent mark{s} child finish{s}\n\
             mount reference align{s} /ref\nmount reads align{s} /reads\n\
             mount aligned{s} align{s} /out\nmount aligned{s} sort{s} /in ro\n\
             mount regions sort{s} /regions\nmount sorted{s} sort{s} /out\n\
             mount sorted{s} mark{s} /in ro\nmount marked{s} mark{s} /out\n\
             mount marked{s} finish{s} /in ro\nmount done{s} finish{s} /out\n\
             extract done{s} r.bam bafs://home/out/s{s}.bam\n\
             extract done{s} r.txt bafs://home/out/s{s}.txt\n"
        )
    }

    /// The same with Snakemake. Each rule notes in a file that it ran to its end.
    fn snakefile(&self) -> String {
        let qualities: Vec<String> = self
            .qualities
            .iter()
            .map(|(sample, quality)| format!("'{sample}': {quality}"))
            .collect();
        let qualities = qualities.join(", ");
        let last = self.samples;
        format!(
            r#"SAMPLES = [str(s) for s in range(1, {last} + 1)]
QUALITY = {{{qualities}}}
REFERENCE = multiext("reference/genome.fa", "", ".amb", ".ann", ".bwt", ".pac", ".sa")

rule all:
    input:
        "out/genome.fai", "out/genome.dict",
        expand("out/s{{s}}.bam", s=SAMPLES), expand("out/s{{s}}.txt", s=SAMPLES)

rule faidx:
    input: "reference/genome.fa"
    output: "out/genome.fai"
    shell: "samtools faidx --fai-idx {{output}} {{input}} && echo faidx >> ran.log"

rule dict:
    input: "reference/genome.fa"
    output: "out/genome.dict"
    shell: "sh tools/dict.sh {{input}} {{output}} && echo dict >> ran.log"

rule align:
    input: REFERENCE, r1="reads/s{{s}}_1.fq", r2="reads/s{{s}}_2.fq"
    output: temp("work/aligned{{s}}.sam")
    shell: "bwa mem -v 1 reference/genome.fa {{input.r1}} {{input.r2}} > {{output}} && "
           "echo align{{wildcards.s}} >> ran.log"

rule sort:
    input: "work/aligned{{s}}.sam"
    output: temp("work/sorted{{s}}.bam")
    shell: "samtools view -b -L regions/s{{wildcards.s}}.bed {{input}} | "
           "samtools sort -o {{output}} - && echo sort{{wildcards.s}} >> ran.log"

rule mark:
    input: "work/sorted{{s}}.bam"
    output: temp("work/marked{{s}}.bam")
    params: quality=lambda wildcards: QUALITY.get(wildcards.s, 20)
    shell: "samtools view -b -q {{params.quality}} -o {{output}} {{input}} && "
           "echo mark{{wildcards.s}} >> ran.log"

rule finish:
    input: "work/marked{{s}}.bam"
    output: bam="out/s{{s}}.bam", text="out/s{{s}}.txt"
    shell: "cp {{input}} {{output.bam}} && samtools flagstat {{input}} > {{output.text}} && "
           "echo finish{{wildcards.s}} >> ran.log"
"#
        )
    }
}

/// The part of the genome that a sample keeps.
fn write_regions(sample: u32, homes: &[&Path; 2]) -> Result<()> {
    for home in homes {
        let text = format!("chr1\t0\t{}\n", GENOME_BASES / 2);
        fs::write(home.join(format!("regions/s{sample}.bed")), text)?;
    }
    Ok(())
}
