//! CRC-32C (Castagnoli), the checksum of several formats on disk.

const POLYNOMIAL: u32 = 0x82f6_3b78;
/// The checksum of each byte.
const TABLE: [u32; 256] = {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < table.len() {
        let mut crc = byte as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = (crc >> 1) ^ (POLYNOMIAL & (crc & 1).wrapping_neg());
            bit += 1;
        }
        table[byte] = crc;
        byte += 1;
    }
    table
};

/// The checksum of bytes.
pub fn crc32c(bytes: &[u8]) -> u32 {
    let next = |crc: u32, byte: &u8| TABLE[((crc ^ u32::from(*byte)) & 0xff) as usize] ^ (crc >> 8);
    !bytes.iter().fold(!0, next)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crc32c_is_the_one_of_the_standard() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
    }
}
