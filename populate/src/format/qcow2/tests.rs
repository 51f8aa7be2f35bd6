//! Images that are built here byte by byte, and hostile headers.

use std::io::Write;

use proptest::prelude::*;

use super::*;

/// Clusters of 64 KiB.
const BITS: u32 = 16;
const CLUSTER: usize = 1 << BITS;

/// A header, and a file whose clusters 1 and 2 are the tables.
fn image(change: &[(usize, &[u8])], entries: &[u64], data: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = vec![0; 3 * CLUSTER];
    let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
    put(0, b"QFI\xfb");
    put(4, &3_u32.to_be_bytes());
    put(20, &BITS.to_be_bytes());
    put(24, &(entries.len() as u64 * CLUSTER as u64).to_be_bytes());
    put(36, &1_u32.to_be_bytes());
    put(40, &(CLUSTER as u64).to_be_bytes());
    put(100, &104_u32.to_be_bytes());
    put(CLUSTER, &((2 * CLUSTER as u64) | COPIED).to_be_bytes());
    for (at, entry) in entries.iter().enumerate() {
        put(2 * CLUSTER + at * 8, &entry.to_be_bytes());
    }
    for (at, value) in change {
        put(*at, value);
    }
    for part in data {
        bytes.extend_from_slice(part);
    }
    bytes
}

fn file(bytes: &[u8]) -> File {
    let mut file = tempfile::tempfile().expect("a file");
    file.write_all(bytes).expect("it is written");
    file
}

fn read(bytes: &[u8]) -> Result<Vec<u8>> {
    let file = file(bytes);
    let image = Image::open(&file)?;
    let mut disk = Vec::new();
    image.read(|at, part| {
        assert_eq!(at, disk.len() as u64, "in order, without a gap");
        disk.extend_from_slice(part);
        Ok(())
    })?;
    assert_eq!(disk.len() as u64, image.header.size);
    Ok(disk)
}

fn deflated(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::DeflateEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).expect("it is compressed");
    encoder.finish().expect("it is compressed")
}

/// The entry of a compressed cluster.
fn packed(offset: u64, length: usize) -> u64 {
    let sectors = (offset % 512 + length as u64).div_ceil(512) - 1;
    COMPRESSED | sectors << (62 - (BITS - 8)) | offset
}

#[test]
fn clusters_are_data_zeros_or_compressed() {
    let start = 3 * CLUSTER as u64;
    let compressed = deflated(&[9; CLUSTER]);
    let entries = [
        COPIED | start,
        0,
        COPIED | start | ZERO,
        ZERO,
        packed(start + CLUSTER as u64 + 100, compressed.len()),
    ];
    let data = [vec![7; CLUSTER], vec![0; 100], compressed];
    let disk = read(&image(&[], &entries, &data)).expect("it is read");
    let expected = [vec![7; CLUSTER], vec![0; 3 * CLUSTER], vec![9; CLUSTER]].concat();
    assert!(disk == expected);
    // The last cluster of the file and that of the disk may be shorter.
    let entries = [COPIED | start];
    let disk = read(&image(
        &[(24, &1000_u64.to_be_bytes())],
        &entries,
        &[vec![7; 500]],
    ));
    assert!(disk.expect("it is read") == [vec![7; 500], vec![0; 500]].concat());
    let nothing = image(&[(24, &[0; 8]), (36, &[0; 4])], &[], &[]);
    assert!(read(&nothing).expect("a disk of 0 bytes").is_empty());
}

#[test]
fn what_refers_elsewhere_or_is_unknown_is_refused() {
    for (what, at, value) in [
        ("backing file", 8, &8_u64.to_be_bytes()[..]),
        ("backing file without a place", 16, &8_u32.to_be_bytes()),
        ("AES", 32, &1_u32.to_be_bytes()),
        ("LUKS", 32, &2_u32.to_be_bytes()),
        ("version", 4, &4_u32.to_be_bytes()),
        ("corrupt", 72, &2_u64.to_be_bytes()),
        ("external data", 72, &4_u64.to_be_bytes()),
        ("extended entries", 72, &16_u64.to_be_bytes()),
        ("a future feature", 72, &(1_u64 << 40).to_be_bytes()),
        ("name of external data", 104, &EXTERNAL_DATA.to_be_bytes()),
        ("header of LUKS", 104, &ENCRYPTION.to_be_bytes()),
        (
            "behind another extension",
            104,
            &[
                1, 2, 3, 4, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0x44, 0x41, 0x54, 0x41,
            ],
        ),
    ] {
        let failure = read(&image(&[(at, value)], &[0], &[])).expect_err(what);
        assert_eq!(failure.reason, "FormatRefused", "{what}");
    }
    let unknown = [
        (72, &COMPRESSION_TYPE.to_be_bytes()[..]),
        (100, &112_u32.to_be_bytes()),
        (104, &[2]),
    ];
    assert_eq!(
        read(&image(&unknown, &[0], &[])).expect_err("lz4").reason,
        "FormatRefused"
    );
}

#[test]
fn tables_that_lie_are_refused() {
    let start = 3 * CLUSTER as u64;
    let hostile: Vec<(&str, Vec<u8>)> = vec![
        ("no clusters", image(&[(20, &[0; 4])], &[0], &[])),
        (
            "large clusters",
            image(&[(20, &22_u32.to_be_bytes())], &[0], &[]),
        ),
        (
            "large disk",
            image(&[(24, &u64::MAX.to_be_bytes())], &[0], &[]),
        ),
        ("small table", image(&[(36, &[0; 4])], &[0], &[])),
        (
            "table within a cluster",
            image(&[(40, &100_u64.to_be_bytes())], &[0], &[]),
        ),
        (
            "table behind the end",
            image(&[(40, &(1_u64 << 60).to_be_bytes())], &[0], &[]),
        ),
        (
            "second table behind the end",
            image(&[(CLUSTER, &(1_u64 << 50).to_be_bytes())], &[0], &[]),
        ),
        (
            "reserved bits",
            image(&[(CLUSTER, &[0x40, 0, 0, 0, 0, 0, 0, 0])], &[0], &[]),
        ),
        ("data behind the end", image(&[], &[start], &[])),
        (
            "data within a cluster",
            image(&[], &[start + 512], &[vec![0; CLUSTER]]),
        ),
        (
            "reserved bits of data",
            image(&[], &[start | 2], &[vec![0; CLUSTER]]),
        ),
        (
            "zero flag of version 2",
            image(&[(4, &2_u32.to_be_bytes())], &[ZERO], &[]),
        ),
        (
            "no deflate",
            image(&[], &[packed(start, 100)], &[vec![0xff; 512]]),
        ),
        (
            "short deflate",
            image(&[], &[packed(start, 100)], &[deflated(&[1; 100])]),
        ),
        ("short header", image(&[], &[0], &[])[..60].to_vec()),
        ("nothing", Vec::new()),
    ];
    for (what, bytes) in hostile {
        let failure = read(&bytes).expect_err(what);
        assert_eq!(failure.reason, "Corrupt", "{what}: {failure}");
    }
}

proptest! {
    /// A file of any length, with any entry of a table.
    #[test]
    fn any_entry_ends_with_a_disk_or_a_refusal(entry: u64, first: u64, length in 0..4 * CLUSTER) {
        let mut bytes = image(&[(CLUSTER, &first.to_be_bytes())], &[entry], &[]);
        bytes.resize(length, 7);
        if let Err(failure) = read(&bytes) {
            prop_assert_eq!(failure.exit_code(), 10);
        }
    }
}

#[test]
fn fuzz_qcow2_header() {
    let seed = image(&[], &[0], &[])[..200].to_vec();
    let valid = Header::parse(&seed).expect("it is valid");
    let target = |bytes: &[u8]| {
        if let Ok(header) = Header::parse(bytes) {
            assert!(header.size.div_ceil(header.l2_covers()) <= L1_BYTES / 8);
            assert!(CLUSTER_BITS.contains(&header.cluster_bits));
        }
    };
    slackwater_core::fuzz::fuzz("qcow2 header", &[seed], target, |bytes| {
        assert!(
            Header::parse(bytes)
                .ok()
                .is_none_or(|header| header == valid)
        );
    });
}

/// An image of four clusters of 512 bytes: data, zeros, data and a compressed one.
fn small(is_zstd: bool) -> Vec<u8> {
    const CLUSTER: usize = 512;
    let packed = match is_zstd {
        true => {
            let header = [0x28, 0xb5, 0x2f, 0xfd, 0, 0];
            let block = (CLUSTER as u32) << 3 | 1;
            [&header[..], &block.to_le_bytes()[..3], &[9; CLUSTER]].concat()
        }
        false => deflated(&[9; CLUSTER]),
    };
    let mut bytes = vec![0; 5 * CLUSTER];
    let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
    put(0, b"QFI\xfb");
    put(4, &3_u32.to_be_bytes());
    put(20, &9_u32.to_be_bytes());
    put(24, &(4 * CLUSTER as u64 - 12).to_be_bytes());
    put(36, &1_u32.to_be_bytes());
    put(40, &(CLUSTER as u64).to_be_bytes());
    if is_zstd {
        put(72, &COMPRESSION_TYPE.to_be_bytes());
        put(104, &[1]);
    }
    put(100, &(if is_zstd { 112_u32 } else { 104 }).to_be_bytes());
    put(CLUSTER, &((2 * CLUSTER as u64) | COPIED).to_be_bytes());
    let sectors = (packed.len() as u64).div_ceil(512) - 1;
    let at = 5 * CLUSTER as u64;
    let entries = [
        (3 * CLUSTER as u64) | COPIED,
        0,
        4 * CLUSTER as u64,
        COMPRESSED | sectors << (62 - (9 - 8)) | at,
    ];
    for (index, entry) in entries.into_iter().enumerate() {
        put(2 * CLUSTER + index * 8, &entry.to_be_bytes());
    }
    bytes[3 * CLUSTER..4 * CLUSTER].fill(1);
    bytes[4 * CLUSTER..].fill(2);
    [bytes, packed].concat()
}

/// Whole images: each becomes a disk of the length that its header says, or is refused.
#[test]
fn fuzz_qcow2_image() {
    /// The capacity of the volume.
    const MOST: usize = 1 << 20;
    let read = |bytes: &[u8]| -> Result<Vec<u8>> {
        let file = file(bytes);
        let image = Image::open(&file)?;
        let mut disk = Vec::new();
        image.read(|at, part| {
            assert_eq!(at, disk.len() as u64, "in order, without a gap");
            disk.extend_from_slice(part);
            match disk.len() > MOST {
                true => Err(refused("is larger than the volume")),
                false => Ok(()),
            }
        })?;
        assert_eq!(disk.len() as u64, image.header.size);
        Ok(disk)
    };
    let seeds = [small(false), small(true)];
    let mut valid = [[1; 512], [0; 512], [2; 512], [9; 512]].concat();
    valid.truncate(valid.len() - 12);
    for seed in &seeds {
        assert!(read(seed).expect("it is valid") == valid);
    }
    let target = |bytes: &[u8]| {
        if let Err(failure) = read(bytes) {
            assert_eq!(failure.exit_code(), 10, "{failure}");
        }
    };
    slackwater_core::fuzz::fuzz("qcow2 image", &seeds, target, |bytes| {
        assert!(read(bytes).ok().is_none_or(|disk| disk == valid));
    });
}
