//! Hostile archives, and those of real programs' formats.

use proptest::prelude::*;

use super::*;

/// A header of ustar with its checksum, and its content.
pub fn entry(name: &[u8], kind: u8, link: &[u8], content: &[u8]) -> Vec<u8> {
    let mut header = Header::new_ustar();
    header.set_mode(0o644);
    header.set_size(content.len() as u64);
    header.set_mtime(7);
    header.set_uid(1);
    header.set_gid(2);
    header.set_entry_type(EntryType::new(kind));
    let bytes = header.as_mut_bytes();
    bytes[..name.len()].copy_from_slice(name);
    bytes[157..157 + link.len()].copy_from_slice(link);
    header.set_cksum();
    let mut all = header.as_bytes().to_vec();
    all.extend_from_slice(content);
    all.resize(all.len().next_multiple_of(BLOCK), 0);
    all
}

pub fn end() -> Vec<u8> {
    vec![0; 2 * BLOCK]
}

fn pax(kind: u8, records: &[(&str, &str)]) -> Vec<u8> {
    let mut content = String::new();
    for (key, value) in records {
        let rest = format!(" {key}={value}\n");
        let mut length = rest.len() + 1;
        while length.to_string().len() + rest.len() != length {
            length += 1;
        }
        content += &format!("{length}{rest}");
    }
    entry(b"pax", kind, b"", content.as_bytes())
}

fn all(parts: &[Vec<u8>]) -> Result<Vec<(Entry, Vec<u8>)>> {
    read(&parts.concat())
}

fn read(bytes: &[u8]) -> Result<Vec<(Entry, Vec<u8>)>> {
    read_of(Archive::new(bytes))
}

fn read_of(mut archive: Archive<&[u8]>) -> Result<Vec<(Entry, Vec<u8>)>> {
    let mut found = Vec::new();
    while let Some(entry) = archive.next_entry()? {
        let mut content = Vec::new();
        let mut part = [0; 100];
        loop {
            let count = archive.read(&mut part)?;
            if count == 0 {
                break;
            }
            content.extend_from_slice(&part[..count]);
        }
        found.push((entry, content));
    }
    Ok(found)
}

fn names(parts: &[Vec<u8>]) -> Vec<String> {
    let found = all(parts).expect("it is read");
    let names = found.iter().filter_map(|(entry, _)| entry.name.as_ref());
    names
        .map(|name| name.as_path().display().to_string())
        .collect()
}

/// umoci writes such layers.
#[test]
fn a_layer_needs_no_end_mark_and_its_last_file_no_padding() {
    let whole = [
        entry(b"a", b'0', b"", &[7; 600]),
        entry(b"b", b'0', b"", b"12"),
    ]
    .concat();
    let content = 3 * BLOCK + BLOCK + 2;
    for length in 0..=whole.len() {
        let read = read_of(Archive::new(&whole[..length]).of_layer(true));
        // The end of "a" is that of its content, or within its padding, or that of its padding.
        let files = match length {
            0 => Some(0),
            length if (BLOCK + 600..=3 * BLOCK).contains(&length) => Some(1),
            length if length >= content => Some(2),
            _ => None,
        };
        assert_eq!(read.ok().map(|files| files.len()), files, "{length}");
        assert!(all(&[whole[..length].to_vec()]).is_err(), "{length}");
    }
    let header = pax(b'x', &[("path", "c")]);
    let long = [whole, header].concat();
    assert!(read_of(Archive::new(&long[..]).of_layer(true)).is_err());
}

#[test]
fn entries_have_their_names_kinds_and_content() {
    let found = all(&[
        entry(b"./", b'5', b"", b""),
        entry(b"d/", b'5', b"", b""),
        entry(b"d/f", b'0', b"", &[7; 700]),
        entry(b"s", b'2', b"/etc/passwd", b""),
        entry(b"h", b'1', b"./d/f", b""),
        entry(b"old/", b'\0', b"", b""),
        entry(b"p", b'6', b"", b""),
        end(),
    ]);
    let found = found.expect("it is read");
    let kinds: Vec<_> = found.iter().map(|(entry, _)| entry.kind.clone()).collect();
    let to = Name::parse(b"d/f").expect("valid").expect("a name");
    assert_eq!(
        kinds,
        [
            Kind::Folder,
            Kind::Folder,
            Kind::File,
            Kind::Symlink(b"/etc/passwd".to_vec()),
            Kind::HardLink(to),
            Kind::Folder,
            Kind::Device
        ]
    );
    assert_eq!(found[2].1, [7; 700]);
    assert_eq!(found[2].0.owner, (1, 2));
    assert_eq!(found[2].0.modified, (7, 0));
    assert_eq!(found[0].0.name, None);
}

#[test]
fn pax_and_gnu_override_the_fields_of_a_header() {
    let long = "n".repeat(200);
    let records = [
        ("path", "a\nb"),
        ("size", "5"),
        ("mtime", "-1.25"),
        ("uid", "3000000000"),
    ];
    let mut file = entry(b"short", b'0', b"", b"12345");
    // A size in the header that is not that of the content.
    file[124..135].copy_from_slice(b"00000000000");
    file[148..156].fill(b' ');
    let sum: u32 = file[..BLOCK].iter().map(|byte| u32::from(*byte)).sum();
    file[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    let found = all(&[pax(b'x', &records), file, end()]).expect("it is read");
    assert_eq!(
        found[0].0.name.as_ref().expect("a name").as_bytes(),
        b"a\nb"
    );
    assert_eq!(found[0].1, b"12345");
    assert_eq!(found[0].0.modified, (-2, 750_000_000));
    assert_eq!(found[0].0.owner, (3_000_000_000, 2));
    let gnu = entry(b"././@LongLink", b'L', b"", format!("{long}\0").as_bytes());
    assert_eq!(names(&[gnu, entry(b"x", b'0', b"", b""), end()]), [long]);
    // They are of one entry.
    let second = entry(b"second", b'0', b"", b"");
    let parts = [
        pax(b'x', &[("path", "first")]),
        entry(b"x", b'0', b"", b""),
        second,
        end(),
    ];
    assert_eq!(names(&parts), ["first", "second"]);
    assert_eq!(
        names(&[
            pax(b'g', &[("comment", "c")]),
            entry(b"x", b'0', b"", b""),
            end()
        ]),
        ["x"]
    );
}

type Hostile = Vec<(&'static str, Vec<Vec<u8>>)>;

fn hostile_names() -> Hostile {
    let file = || entry(b"x", b'0', b"", b"");
    vec![
        (
            "absolute",
            vec![entry(b"/etc/passwd", b'0', b"", b""), end()],
        ),
        ("above", vec![entry(b"a/../../b", b'0', b"", b""), end()]),
        (
            "above by pax",
            vec![pax(b'x', &[("path", "../b")]), file(), end()],
        ),
        (
            "hard link above",
            vec![entry(b"x", b'1', b"../b", b""), end()],
        ),
        (
            "absolute hard link",
            vec![entry(b"x", b'1', b"/etc/passwd", b""), end()],
        ),
        (
            "hard link to the root",
            vec![entry(b"x", b'1', b".", b""), end()],
        ),
        ("empty link", vec![entry(b"x", b'2', b"", b""), end()]),
    ]
}

fn hostile_headers() -> Hostile {
    let file = || entry(b"x", b'0', b"", b"");
    vec![
        ("sparse", vec![entry(b"x", b'S', b"", b""), end()]),
        (
            "sparse by pax",
            vec![pax(b'x', &[("GNU.sparse.major", "1")]), file(), end()],
        ),
        ("many volumes", vec![entry(b"x", b'M', b"", b""), end()]),
        (
            "all renamed",
            vec![pax(b'g', &[("path", "y")]), file(), end()],
        ),
        (
            "all resized",
            vec![pax(b'g', &[("size", "1")]), file(), end()],
        ),
        (
            "huge size",
            vec![
                pax(b'x', &[("size", "18446744073709551615")]),
                file(),
                end(),
            ],
        ),
        (
            "negative size",
            vec![pax(b'x', &[("size", "-1")]), file(), end()],
        ),
        (
            "large owner",
            vec![pax(b'x', &[("uid", "4294967296")]), file(), end()],
        ),
        ("no end", vec![file()]),
        ("nothing", vec![]),
        ("half a header", vec![vec![1; 100]]),
        (
            "half a file",
            vec![entry(b"x", b'0', b"", b"12")[..600].to_vec()],
        ),
        ("no header", vec![vec![b'x'; BLOCK], end()]),
        ("wrong checksum", vec![[b"y", &file()[1..]].concat(), end()]),
        (
            "invalid pax",
            vec![entry(b"p", b'x', b"", b"99 path=x\n"), file(), end()],
        ),
        (
            "pax without end",
            vec![entry(b"p", b'x', b"", b"9 path=xy"), file(), end()],
        ),
        (
            "many headers",
            vec![pax(b'x', &[("comment", "c")]).repeat(20), file(), end()],
        ),
        (
            "long header",
            vec![entry(b"p", b'x', b"", &vec![b'1'; 2 << 20]), file(), end()],
        ),
        (
            "long name",
            vec![entry(b"p", b'L', b"", &[b'n'; 5000]), file(), end()],
        ),
    ]
}

#[test]
fn hostile_archives_are_refused() {
    for (what, parts) in hostile_names().into_iter().chain(hostile_headers()) {
        let failure = all(&parts).expect_err(what);
        assert_eq!(failure.exit_code(), 10, "{what}: {failure}");
    }
}

/// A header that announces more than there is takes no memory for it.
#[test]
fn a_large_size_takes_no_memory() {
    let mut header = Header::new_gnu();
    header.set_entry_type(EntryType::GNULongName);
    header.set_size(u64::MAX / 2);
    header.set_cksum();
    let failure = read(header.as_bytes()).expect_err("it is refused");
    assert!(failure.to_string().contains("longer than"));
}

proptest! {
    #[test]
    fn any_bytes_end_with_entries_or_a_refusal(bytes in prop::collection::vec(any::<u8>(), 0..2000)) {
        if let Err(failure) = read(&bytes) {
            prop_assert_eq!(failure.exit_code(), 10);
        }
    }
}

#[test]
fn fuzz_archive() {
    let seed = [
        pax(b'x', &[("path", "a/b"), ("mtime", "1.5"), ("size", "3")]),
        entry(b"x", b'0', b"", b"123"),
        entry(b"././@LongLink", b'L', b"", b"long\0"),
        entry(b"y", b'2', b"a/b", b""),
        end(),
    ]
    .concat();
    let valid = read(&seed).expect("it is valid");
    let target = |bytes: &[u8]| {
        if let Ok(found) = read(bytes) {
            for (entry, content) in found {
                assert_eq!(content.len() as u64, entry.size);
                assert!(entry.mode <= 0o7777);
                for part in entry
                    .name
                    .iter()
                    .flat_map(|name| name.as_path().components())
                {
                    assert!(matches!(part, std::path::Component::Normal(_)));
                }
            }
        }
    };
    slackwater_core::fuzz::fuzz("archive", &[seed], target, |bytes| {
        assert!(read(bytes).is_err() || read(bytes).is_ok_and(|found| found == valid));
    });
}
