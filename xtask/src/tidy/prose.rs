//! `cargo xtask prose`: measures how the documents read. Counts sentences and their lengths; judges
//! no style beyond that, and changes nothing.

use serde_json::json;

use super::files::SourceFile;
use super::violation::RuleViolation;
use super::words;

/// How many of the longest sentences the command prints.
const LONGEST_SHOWN_MAX: usize = 20;

/// The most words of a sentence in a document.
const WORDS_MAX: usize = 40;

/// One sentence of a document.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Sentence {
    /// The line on which it begins, from 1.
    pub(super) line: usize,
    /// Its words, with marks of Markdown removed.
    pub(super) text: String,
}

impl Sentence {
    /// Words are what white space separates and has a letter or a digit.
    fn count_words(&self) -> usize {
        let words = self.text.split_whitespace();
        words
            .filter(|word| word.contains(char::is_alphanumeric))
            .count()
    }
}

/// Prints the lengths of all sentences of the documents, the longest ones by name.
pub(super) fn print_sentence_lengths(files: &[SourceFile], arguments: &[String]) {
    let documents: Vec<&SourceFile> = files.iter().filter(|file| is_document(file)).collect();
    let mut all = Vec::new();
    for file in &documents {
        let found = find_sentences(&file.text).into_iter();
        all.extend(found.map(|sentence| (&file.path, sentence)));
    }
    all.sort_by_key(|(_, sentence)| std::cmp::Reverse(sentence.count_words()));
    for (path, sentence) in all.iter().take(LONGEST_SHOWN_MAX) {
        let (line, words) = (sentence.line, sentence.count_words());
        println!("{path}:{line}: {words} words: {}", sentence.text);
    }
    let lengths: Vec<usize> = all
        .iter()
        .map(|(_, sentence)| sentence.count_words())
        .collect();
    let figures = SentenceLengths::from_lengths(&lengths);
    let retired = files.iter().flat_map(words::check_retired).count();
    let ambiguous = words::check_ambiguous(files).len();
    if arguments.iter().any(|argument| argument == "--json") {
        let figures = json!({
            "documents": documents.len(),
            "sentences": lengths.len(),
            "mean_words": figures.mean,
            "p90_words": figures.p90,
            "longest": figures.longest,
            "retired_words": retired,
            "ambiguous_names": ambiguous,
        });
        println!("{figures}");
    } else {
        let SentenceLengths { mean, p90, longest } = figures;
        println!(
            "{} documents, {} sentences: {mean} words on average, p90 {p90}, longest {longest}; \
             {retired} retired words, {ambiguous} ambiguous names",
            documents.len(),
            lengths.len()
        );
    }
}

/// What users read as a book.
pub(super) fn is_document(file: &SourceFile) -> bool {
    file.has_extension("md") && (file.path.starts_with("docs/") || file.path == "README.md")
}

/// Lengths of sentences, in words.
#[derive(Debug, PartialEq)]
struct SentenceLengths {
    mean: f64,
    p90: usize,
    longest: usize,
}

impl SentenceLengths {
    /// Of lengths in descending order.
    fn from_lengths(words: &[usize]) -> Self {
        let sum: usize = words.iter().sum();
        #[expect(clippy::cast_precision_loss, reason = "documents have few words")]
        let mean = sum as f64 / words.len().max(1) as f64;
        Self {
            mean: (mean * 10.0).round() / 10.0,
            p90: words.get(words.len() / 10).copied().unwrap_or(0),
            longest: words.first().copied().unwrap_or(0),
        }
    }
}

/// Sentences of the documents that are longer than a reader takes in at once.
pub(super) fn check_lengths(file: &SourceFile) -> Vec<RuleViolation> {
    if !is_document(file) {
        return Vec::new();
    }
    let all = find_sentences(&file.text).into_iter();
    let long = all.filter(|sentence| sentence.count_words() > WORDS_MAX);
    long.map(|sentence| {
        let words = sentence.count_words();
        let what = format!("a sentence of {words} words; {WORDS_MAX} are the most");
        RuleViolation::new(&file.path, sentence.line, what)
    })
    .collect()
}

/// The sentences of paragraphs and list items; headings, tables and code have none.
pub(super) fn find_sentences(text: &str) -> Vec<Sentence> {
    let mut found = Vec::new();
    let mut block: Vec<(usize, String)> = Vec::new();
    let mut in_fence = false;
    for (at, line) in text.lines().enumerate() {
        let bare = line.trim();
        let is_fence = bare.starts_with("```");
        in_fence ^= is_fence;
        let is_apart = is_fence || in_fence || bare.is_empty() || bare.starts_with(['|', '#', '<']);
        let item = strip_item_mark(bare);
        if is_apart || item.is_some() {
            split_sentences(&block, &mut found);
            block.clear();
        }
        if !is_apart {
            block.push((at + 1, strip_marks(item.unwrap_or(bare))));
        }
    }
    split_sentences(&block, &mut found);
    found
}

/// What follows the mark of a list item or of a quotation.
fn strip_item_mark(line: &str) -> Option<&str> {
    let marks = ["* ", "- ", "+ ", "> "];
    if let Some(text) = marks.iter().find_map(|mark| line.strip_prefix(mark)) {
        return Some(text);
    }
    let (number, text) = line.split_once(". ")?;
    let is_number = !number.is_empty() && number.chars().all(|digit| digit.is_ascii_digit());
    is_number.then_some(text)
}

/// A line as it is read aloud: code becomes one word, links their text, emphasis nothing.
fn strip_marks(line: &str) -> String {
    let parts = line.split('`').enumerate();
    let text: String = parts
        .map(|(at, part)| match at % 2 {
            0 => part.to_owned(),
            _ => "code".to_owned(),
        })
        .collect();
    let mut read = String::new();
    let mut rest = text.as_str();
    while let Some((before, link)) = rest.split_once("](") {
        read.push_str(before);
        rest = link.split_once(')').map_or("", |(_, after)| after);
    }
    read.push_str(rest);
    read.replace(['[', ']', '*'], "")
}

/// Splits a paragraph where a sentence ends.
fn split_sentences(block: &[(usize, String)], sentences: &mut Vec<Sentence>) {
    let mut open: Option<Sentence> = None;
    for (line, text) in block {
        for word in text.split_whitespace() {
            let sentence = open.get_or_insert_with(|| Sentence {
                line: *line,
                text: String::new(),
            });
            if !sentence.text.is_empty() {
                sentence.text.push(' ');
            }
            sentence.text.push_str(word);
            if ends_sentence(word) {
                sentences.extend(open.take());
            }
        }
    }
    sentences.extend(open);
}

fn ends_sentence(word: &str) -> bool {
    const ABBREVIATIONS: [&str; 6] = ["e.g.", "i.e.", "cf.", "etc.", "al.", "vs."];
    let word = word.trim_matches(['(', ')', '"', '\'', '“', '”']);
    word.ends_with(['.', '!', '?']) && !ABBREVIATIONS.contains(&word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(text: &str, expected: &[(usize, &str)]) {
        let found = find_sentences(text);
        let found: Vec<_> = found.iter().map(|s| (s.line, s.text.as_str())).collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn sentences_end_at_stops_and_blocks() {
        check(
            "# Head\n\nOne two,\nthree. Four (e.g. five)?\n* Six\n  seven\n1. Eight\n",
            &[
                (3, "One two, three."),
                (4, "Four (e.g. five)?"),
                (5, "Six seven"),
                (7, "Eight"),
            ],
        );
    }

    #[test]
    fn code_and_tables_are_no_sentences() {
        check(
            "```\nNo. No.\n```\n| a | b. |\n<!-- no -->\nYes.",
            &[(6, "Yes.")],
        );
    }

    #[test]
    fn markup_is_ignored() {
        check(
            "**See** [the page](a/b.md#c) and `x y z` now.",
            &[(1, "See the page and code now.")],
        );
    }

    #[test]
    fn figures_describe_the_lengths() {
        let words: Vec<usize> = (1..=20).rev().collect();
        let figures = SentenceLengths::from_lengths(&words);
        assert_eq!((figures.p90, figures.longest), (18, 20));
        assert!((figures.mean - 10.5).abs() < 1e-9);
        assert_eq!(SentenceLengths::from_lengths(&[]).longest, 0);
    }
}
