//! Archives that are whole, damaged, truncated, out of order or mixed.

use std::collections::BTreeSet;

use proptest::prelude::*;
use slackwater_core::fuzz::fuzz;
use uuid::Uuid;

use super::*;
use crate::model::{AccessMode, AccessType, FsType};
use crate::record::FormattedAs;
use crate::record::formats::{check_with, files};

/// An archive as values.
type Contents = (Manifest, Vec<(u32, SnapshotRange)>);

fn read(bytes: &[u8]) -> Result<Contents> {
    let mut archive = ArchiveReader::begin(bytes)?;
    let mut ranges = Vec::new();
    for member in 0..archive.manifest.members.len() {
        while let Some(range) = archive.range(member)? {
            ranges.push((member as u32, range));
        }
    }
    archive.end()?;
    Ok((archive.manifest, ranges))
}

fn written((manifest, ranges): &Contents) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut archive = ArchiveWriter::begin(&mut bytes, manifest).unwrap();
    for (member, range) in ranges {
        archive.segment(*member, range).unwrap();
    }
    archive.end().unwrap();
    bytes
}

fn refusal(bytes: &[u8]) -> String {
    match read(bytes) {
        Err(error @ Error::Invalid { .. }) => error.to_string(),
        other => panic!("{other:?}"),
    }
}

fn snapshot(n: u64, image_bytes: u64) -> ArchivedSnapshot {
    ArchivedSnapshot {
        snapshot_id: format!("snapshot-{n}"),
        volume_id: format!("volume-{n}"),
        name: format!("pvc-{n}"),
        pool: "default".into(),
        size: image_bytes,
        image_bytes,
        block_size: 512,
        allocation: Allocation::Thin,
        wipe: Wipe::None,
        formatted: Some(Formatted::complete(FormattedAs::Ext4, Uuid::from_u128(7))),
        capabilities: vec![Capability {
            access_type: AccessType::Mount {
                fs_type: Some(FsType::Ext4),
                mount_flags: Vec::new(),
            },
            access_mode: AccessMode::SingleNodeWriter,
        }],
        cut_at: 1_700_000_000_000_000_000,
        level: Level::Filesystem,
        identity: 100 + n,
        base: None,
    }
}

fn range(offset: u64, length: u64, pieces: Vec<Piece>, changed: Vec<Range<u64>>) -> SnapshotRange {
    SnapshotRange {
        checksum: None,
        offset,
        length,
        pieces,
        changed,
    }
}

fn piece(offset: u64, byte: u8, length: usize) -> Piece {
    Piece {
        offset,
        bytes: vec![byte; length],
    }
}

/// One snapshot of two segments, the first of which is a hole.
fn whole() -> Contents {
    let manifest = Manifest {
        group: None,
        members: vec![snapshot(1, SEGMENT_BYTES + 8192)],
    };
    let pieces = vec![piece(SEGMENT_BYTES + 4096, 5, 600)];
    let ranges = vec![
        (0, range(0, SEGMENT_BYTES, Vec::new(), Vec::new())),
        (0, range(SEGMENT_BYTES, 8192, pieces, Vec::new())),
    ];
    (manifest, ranges)
}

/// Two members of a group of three: differences of one, and the other one as a whole.
fn group() -> Contents {
    let manifest = Manifest {
        group: Some(ArchivedGroup {
            id: "group-1".into(),
            members: vec!["snapshot-1".into(), "snapshot-2".into(), "far".into()],
        }),
        members: vec![
            ArchivedSnapshot {
                base: Some(99),
                ..snapshot(1, 1 << 20)
            },
            ArchivedSnapshot {
                formatted: None,
                ..snapshot(2, 4096)
            },
        ],
    };
    let changed = vec![0..4096, 8192..16384];
    let pieces = vec![piece(0, 1, 512), piece(12288, 2, 512)];
    let ranges = vec![
        (0, range(0, 65536, pieces, changed)),
        (0, range(65536, (1 << 20) - 65536, Vec::new(), Vec::new())),
        (1, range(0, 4096, vec![piece(0, 3, 512)], Vec::new())),
    ];
    (manifest, ranges)
}

/// Where each frame begins, and the end.
fn frames(bytes: &[u8]) -> Vec<usize> {
    let mut begins = vec![MAGIC.len() + 2];
    while begins[begins.len() - 1] < bytes.len() {
        let at = begins[begins.len() - 1];
        let head = Head::parse(bytes[at..at + HEADER_BYTES].try_into().unwrap()).unwrap();
        begins.push(at + HEADER_BYTES + head.length as usize + DIGEST_BYTES);
    }
    begins
}

#[test]
fn archives_keep_their_format() {
    let expected = vec![("whole.bin", whole()), ("group-with-base.bin", group())];
    check_with("archive", expected, |bytes| read(bytes).unwrap(), written);
}

#[test]
fn every_flipped_bit_is_found() {
    for contents in [whole(), group()] {
        let mut bytes = written(&contents);
        assert_eq!(read(&bytes).unwrap(), contents);
        for at in 0..bytes.len() {
            let bit = 1 << (at % 8);
            bytes[at] ^= bit;
            refusal(&bytes);
            bytes[at] ^= bit;
        }
    }
}

#[test]
fn every_truncation_is_found_and_reported_with_its_frame() {
    let bytes = written(&group());
    let begins = frames(&bytes);
    for length in 0..bytes.len() {
        let message = refusal(&bytes[..length]);
        let frame = begins.iter().rposition(|begin| *begin <= length);
        let expected = match frame {
            Some(frame) => format!(
                "it ends within frame {frame}, which begins at byte {}",
                begins[frame]
            ),
            None => "it ends within its beginning".into(),
        };
        assert!(message.contains(&expected), "{length}: {message}");
    }
    let mut longer = bytes;
    longer.push(0);
    assert!(refusal(&longer).contains("more data after its end"));
}

#[test]
fn frames_out_of_order_or_of_another_archive_are_found() {
    let bytes = written(&group());
    let begins = frames(&bytes);
    let frame = |n: usize| &bytes[begins[n]..begins[n + 1]];
    let swapped = [&bytes[..begins[1]], frame(2), frame(1), frame(3), frame(4)].concat();
    let message = refusal(&swapped);
    assert!(
        message.contains("out of order: frame 2 is in place of frame 1"),
        "{message}"
    );
    let left_out = [&bytes[..begins[2]], frame(3), frame(4)].concat();
    let message = refusal(&left_out);
    assert!(
        message.contains("frame 3 is in place of frame 2"),
        "{message}"
    );
    // The segments are the same, and the manifest is not.
    let mut other = group();
    other.0.members[0].identity = 1;
    let other = written(&other);
    let mixed = [&other[..frames(&other)[1]], &bytes[begins[1]..]].concat();
    let message = refusal(&mixed);
    assert!(message.contains("frame 1, which begins at"), "{message}");
    assert!(message.contains("does not match its SHA-256"), "{message}");
}

#[test]
fn an_end_with_the_digest_of_other_data_is_refused() {
    let (manifest, ranges) = whole();
    let mut bytes = Vec::new();
    let mut archive = ArchiveWriter::begin(&mut bytes, &manifest).unwrap();
    for (member, range) in &ranges {
        archive.segment(*member, range).unwrap();
    }
    archive.frame(END_FRAME, &[0; DIGEST_BYTES]).unwrap();
    assert!(refusal(&bytes).contains("SHA-256 of the archive does not match"));
}

#[test]
fn segments_that_do_not_fit_are_refused() {
    let refused = |change: &dyn Fn(&mut Contents), why: &str| {
        let mut contents = group();
        change(&mut contents);
        let message = refusal(&written(&contents));
        assert!(message.contains(why), "{message}");
    };
    refused(
        &|it| it.1[1].1.offset = 4096,
        "offset 4096 of snapshot 0 instead of offset 65536",
    );
    refused(&|it| it.1[2].0 = 0, "instead of offset 0 of snapshot 1");
    refused(&|it| it.1[1].1.length += 1, "beyond the image");
    refused(&|it| it.1[1].1.length = 0, "beyond the image");
    refused(&|it| it.1[0].1.changed.reverse(), "parts are out of order");
    refused(&|it| it.1[0].1.pieces.reverse(), "parts are out of order");
    refused(
        &|it| it.1[2].1.pieces[0].offset = 4000,
        "data is out of order",
    );
    refused(
        &|it| it.1[2].1.length = 512,
        "a segment of a whole snapshot",
    );
    refused(&|it| drop(it.1.pop()), "kind 3 instead of 2");
    refused(&|it| it.0.members.clear(), "1 to 1024 snapshots");
    refused(
        &|it| it.0.members[1].image_bytes = 512,
        "shorter than its volume",
    );
    refused(
        &|it| it.0.members[1].image_bytes = u64::MAX,
        "length of an image",
    );
    refused(&|it| it.0.members[1].block_size = 0, "block size");
    refused(&|it| it.0.members[0].base = Some(101), "its own base");
}

#[test]
fn another_version_and_another_file_are_refused_by_name() {
    let mut bytes = written(&whole());
    bytes[MAGIC.len()] = 2;
    assert!(refusal(&bytes).contains("version 2"));
    assert!(refusal(b"not an archive at all").contains("slackwater export"));
}

/// Ranges of differences, or of a whole image, with blocks of data at random.
fn ranges(base: bool) -> impl Strategy<Value = (u64, Vec<SnapshotRange>)> {
    let blocks = prop::collection::vec((any::<bool>(), 1..=255_u8), 1..40);
    prop::collection::vec(blocks, 1..4).prop_map(move |segments| {
        let (mut offset, mut ranges) = (0, Vec::new());
        let last = segments.len() - 1;
        for (n, blocks) in segments.iter().enumerate() {
            let used = blocks.len() as u64 * 4096;
            let length = if base || n == last {
                used
            } else {
                SEGMENT_BYTES
            };
            let (mut pieces, mut changed) = (Vec::new(), Vec::new());
            for (at, (is_data, byte)) in (offset..).step_by(4096).zip(blocks) {
                if *is_data {
                    pieces.push(piece(at, *byte, 4096));
                }
                if base {
                    changed.push(at..at + 4096);
                }
            }
            ranges.push(range(offset, length, pieces, changed));
            offset += length;
        }
        (offset, ranges)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn what_is_written_is_read((base, (bytes, ranges)) in any::<bool>().prop_flat_map(|base| (Just(base), ranges(base))), cut in any::<prop::sample::Index>()) {
        let member = ArchivedSnapshot { base: base.then_some(9), ..snapshot(1, bytes) };
        let manifest = Manifest { group: None, members: vec![member] };
        let contents = (manifest, ranges.into_iter().map(|range| (0, range)).collect());
        let mut archive = written(&contents);
        prop_assert_eq!(read(&archive).unwrap(), contents);
        let at = cut.index(archive.len());
        archive[at] ^= 1;
        prop_assert!(read(&archive).is_err());
    }
}

/// The bodies of the frames of a kind in the samples.
fn bodies(kind: u32) -> Vec<Vec<u8>> {
    let mut found = Vec::new();
    for file in files("archive").into_values() {
        for begin in frames(&file) {
            let Some(Ok(head)) = file.get(begin..begin + HEADER_BYTES).map(TryInto::try_into)
            else {
                continue;
            };
            let head = Head::parse(head).unwrap();
            if head.kind == kind {
                let body = begin + HEADER_BYTES;
                found.push(file[body..body + head.length as usize].to_vec());
            }
        }
    }
    found
}

#[test]
fn fuzz_archives() {
    let seeds: Vec<_> = files("archive").into_values().collect();
    // Every change is found, so the planted bug is that one is found where it should not be.
    let kinds = |bytes: &[u8]| read(bytes).err().map(|error| error.to_string());
    let target = |bytes: &[u8]| drop(read(bytes));
    fuzz("archive", &seeds, target, |bytes| {
        assert!(kinds(bytes).is_none_or(|message| !message.contains("SHA-256")));
    });
}

#[test]
fn fuzz_segments_of_archives() {
    let seeds = bodies(SEGMENT_FRAME);
    let offsets: BTreeSet<_> = seeds
        .iter()
        .map(|seed| parse_segment(seed).unwrap().1.offset)
        .collect();
    let target = |bytes: &[u8]| {
        if let Some((_, range)) = parse_segment(bytes) {
            let _ = check_range(&range, 1 << 20, true);
            let _ = check_range(&range, 1 << 20, false);
        }
    };
    fuzz("segment", &seeds, target, |bytes| {
        assert!(parse_segment(bytes).is_none_or(|(_, range)| offsets.contains(&range.offset)));
    });
}

#[test]
fn fuzz_manifests_of_archives() {
    let target = |bytes: &[u8]| drop(parse_manifest(bytes));
    fuzz("manifest", &bodies(MANIFEST_FRAME), target, |bytes| {
        let members = parse_manifest(bytes)
            .map(|it| it.members)
            .unwrap_or_default();
        assert!(members.iter().all(|one| one.size % 4096 == 0));
    });
}
