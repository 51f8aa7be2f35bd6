//! Data of a range of an image that is sent to another host, without its zeros.

/// Blocks of this many bytes that contain only zeros are left out.
pub const ZERO_BLOCK: u64 = 4096;

/// Data of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Offset of the first byte in the image.
    pub offset: u64,
    pub bytes: Vec<u8>,
}

impl Piece {
    /// Offset of the byte after the last one.
    pub fn end(&self) -> u64 {
        self.offset.saturating_add(self.bytes.len() as u64)
    }
}

/// Adds what was read at an offset to pieces that ascend, without blocks of zeros. The blocks are
/// counted from the beginning of the image, so the result depends on its content alone.
pub fn add(pieces: &mut Vec<Piece>, mut offset: u64, mut bytes: &[u8]) {
    while !bytes.is_empty() {
        let data = leading(offset, bytes, false);
        let (run, after) = bytes.split_at(data);
        match pieces.last_mut() {
            _ if run.is_empty() => {}
            Some(last) if last.end() == offset => last.bytes.extend_from_slice(run),
            Some(_) | None => pieces.push(Piece {
                offset,
                bytes: run.to_vec(),
            }),
        }
        let zeros = leading(offset + data as u64, after, true);
        offset += (data + zeros) as u64;
        bytes = &after[zeros..];
    }
}

/// The same with bytes that are kept, if possible, and not copied.
pub fn add_owned(pieces: &mut Vec<Piece>, offset: u64, bytes: Vec<u8>) {
    let continues = pieces.last().is_some_and(|last| last.end() == offset);
    match !bytes.is_empty() && !continues && leading(offset, &bytes, false) == bytes.len() {
        true => pieces.push(Piece { offset, bytes }),
        false => add(pieces, offset, &bytes),
    }
}

/// The length of the blocks at the beginning that contain zeros alone, or other bytes.
fn leading(offset: u64, bytes: &[u8], zeros: bool) -> usize {
    static ZEROS: [u8; ZERO_BLOCK as usize] = [0; ZERO_BLOCK as usize];
    let mut length = 0;
    while length < bytes.len() {
        let rest = ZERO_BLOCK - (offset + length as u64) % ZERO_BLOCK;
        let end = bytes.len().min(length + rest as usize);
        let block = &bytes[length..end];
        if (block == &ZEROS[..block.len()]) != zeros {
            break;
        }
        length = end;
    }
    length
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn pieces_have_all_data_and_no_block_of_zeros(
            blocks in prop::collection::vec(0_u8..3, 1..40),
            first in 0..8_u64,
            cuts in prop::collection::vec(0_usize..40, 0..6),
        ) {
            let start = first * ZERO_BLOCK;
            let all: Vec<u8> = blocks
                .iter()
                .flat_map(|byte| {
                    let mut block = vec![0; ZERO_BLOCK as usize];
                    block[17] = *byte;
                    block
                })
                .collect();
            let read = |cuts: &[usize]| {
                let (mut pieces, mut at) = (Vec::new(), 0);
                let ends = cuts.iter().map(|cut| cut * ZERO_BLOCK as usize);
                for end in ends.filter(|end| *end < all.len()).chain([all.len()]) {
                    if end > at {
                        add(&mut pieces, start + at as u64, &all[at..end]);
                        at = end;
                    }
                }
                pieces
            };
            let pieces = read(&[]);
            let mut owned = Vec::new();
            add_owned(&mut owned, start, all.clone());
            prop_assert_eq!(&pieces, &owned);
            let mut cuts = cuts;
            cuts.sort_unstable();
            prop_assert_eq!(&pieces, &read(&cuts), "however it was read");
            let mut written = vec![0; all.len()];
            for piece in &pieces {
                let at = (piece.offset - start) as usize;
                written[at..at + piece.bytes.len()].copy_from_slice(&piece.bytes);
            }
            prop_assert!(written == all);
            let sent: usize = pieces.iter().map(|piece| piece.bytes.len()).sum();
            let data = blocks.iter().filter(|byte| **byte != 0).count();
            prop_assert_eq!(sent, data * ZERO_BLOCK as usize);
        }
    }
}
