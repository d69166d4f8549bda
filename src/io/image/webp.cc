// WebP through libwebp's decoder of animations, which takes still pictures too; Pillow uses the
// same.
#include <webp/decode.h>
#include <webp/demux.h>

#include <memory>

#include "io/image/decoders.h"

namespace cadre {
namespace {

// The content of a chunk of the file's metadata; empty when there is none.
std::span<const std::byte> chunk(const WebPDemuxer* file, const char* fourcc) {
  WebPChunkIterator iterator;
  std::span<const std::byte> result;
  if (WebPDemuxGetChunk(file, fourcc, 1, &iterator) != 0) {
    result = std::as_bytes(std::span(iterator.chunk.bytes, iterator.chunk.size));
  }
  WebPDemuxReleaseChunkIterator(&iterator);
  return result;
}

}  // namespace

DecodedImage decode_webp(const ImageFile& file) {
  const WebPData data{reinterpret_cast<const uint8_t*>(file.bytes.data()), file.bytes.size()};
  WebPBitstreamFeatures features;
  if (WebPGetFeatures(data.bytes, data.size, &features) != VP8_STATUS_OK) {
    image_error(file.name, "WebP: the header is damaged; fetch it again");
  }
  DecodedImage result{make_image(features.height, features.width, file)};

  WebPAnimDecoderOptions options;
  if (WebPAnimDecoderOptionsInit(&options) == 0)
    image_error(file.name, "WebP: libwebp cannot start");
  options.color_mode = MODE_RGBA;
  const std::unique_ptr<WebPAnimDecoder, decltype(&WebPAnimDecoderDelete)> decoder(
      WebPAnimDecoderNew(&data, &options), WebPAnimDecoderDelete);
  WebPAnimInfo info;
  uint8_t* rgba = nullptr;
  int timestamp = 0;
  if (!decoder || WebPAnimDecoderGetInfo(decoder.get(), &info) == 0 ||
      info.canvas_width != static_cast<uint32_t>(features.width) ||
      info.canvas_height != static_cast<uint32_t>(features.height) ||
      WebPAnimDecoderGetNext(decoder.get(), &rgba, &timestamp) == 0) {
    image_error(file.name, "WebP: cut short or damaged; fetch it again");
  }
  for (size_t i = 0; i < result.image.rgb.size() / 3; ++i) {
    for (size_t c = 0; c < 3; ++c) result.image.rgb[3 * i + c] = rgba[4 * i + c];
  }
  const WebPDemuxer* chunks = WebPAnimDecoderGetDemuxer(decoder.get());
  const auto xmp = chunk(chunks, "XMP ");
  result.orientation = read_orientation(chunk(chunks, "EXIF"),
                                        {reinterpret_cast<const char*>(xmp.data()), xmp.size()});
  return result;
}

}  // namespace cadre
