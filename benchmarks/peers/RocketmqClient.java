import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Locale;
import java.util.Random;
import java.util.concurrent.ConcurrentLinkedQueue;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicLong;
import java.util.concurrent.atomic.AtomicReference;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.common.TopicConfig;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.remoting.protocol.route.BrokerData;
import org.apache.rocketmq.remoting.protocol.subscription.SubscriptionGroupConfig;
import org.apache.rocketmq.tools.admin.DefaultMQAdminExt;

/**
 * RocketMQ by its Java client, told what `traffic.py` tells the other clients, in the same lines of JSON.
 *
 * Batches of 500 from four threads, each sent and answered as one; a push consumer whose listener takes up to
 * a hundred at a time. A drain is timed from its first message on, for a consumer waits until it is given queues.
 */
public class RocketmqClient {
  private static final int BATCH = 500;
  private static final int SENDERS = 4;
  private static final int LISTENED_AT_ONCE = 100;
  private static final int FIRST_SENDS = 20;
  private static final int BODIES = 4096;
  private static final int QUEUES = 4;
  private static final byte[] PROBE = "probe".getBytes(StandardCharsets.US_ASCII);
  private static final AtomicInteger NAMES = new AtomicInteger();
  private static final String GROUP = "board";
  /** What is ended after an answer, so that nobody waits for it. */
  private static final List<Runnable> ENDING = new ArrayList<>();
  private static String nameServer;
  private static DefaultMQAdminExt admin;
  private static PrintStream out;

  interface Work {
    void run() throws Exception;
  }

  public static void main(String[] arguments) throws Exception {
    System.setProperty("rocketmq.client.logUseSlf4j", "true");
    out = System.out;
    System.setOut(System.err);
    nameServer = arguments[0];
    BufferedReader in =
        new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
    out.println("\"ready\"");
    String line;
    while ((line = in.readLine()) != null) {
      // An order is a list of words and numbers: ["produce", "subject", 1024, 500]
      String[] order = line.replaceAll("[\\[\\]\",]", " ").trim().split(" +");
      try {
        out.println(obey(order));
        for (Runnable ending : ENDING) ending.run();
        ENDING.clear();
      } catch (Throwable error) {
        error.printStackTrace();
        System.exit(1);
      }
    }
    System.exit(0);
  }

  private static String obey(String[] order) throws Exception {
    switch (order[0]) {
      case "create":
        return create(order[1]);
      case "produce":
        return produce(order[1], number(order[2]), number(order[3]));
      case "consume":
        return consume(order[1], number(order[2]), number(order[3]));
      case "receive":
        return receive(order[1], number(order[2]));
      case "lone":
        return lone(order[1], number(order[2]), number(order[3]));
      case "pace":
        return pace(order[1], number(order[2]), number(order[3]), number(order[4]));
      default:
        throw new IllegalArgumentException(order[0]);
    }
  }

  private static String create(String subject) throws Exception {
    if (admin == null) {
      admin = new DefaultMQAdminExt();
      admin.setNamesrvAddr(nameServer);
      admin.setInstanceName("admin");
      admin.start();
    }
    TopicConfig topic = new TopicConfig(subject);
    topic.setReadQueueNums(QUEUES);
    topic.setWriteQueueNums(QUEUES);
    topic.setPerm(6);
    SubscriptionGroupConfig group = new SubscriptionGroupConfig();
    group.setGroupName(subject + GROUP);
    long endsAt = System.nanoTime() + TimeUnit.SECONDS.toNanos(60);
    while (true) {
      try {
        for (BrokerData data : brokers()) {
          for (String address : data.getBrokerAddrs().values()) {
            admin.createAndUpdateTopicConfig(address, topic);
            admin.createAndUpdateSubscriptionGroupConfig(address, group);
          }
        }
        admin.examineTopicRouteInfo(subject);
        break;
      } catch (Exception notYet) {
        if (System.nanoTime() > endsAt) throw notYet;
        Thread.sleep(50);
      }
    }
    return "\"created\"";
  }

  private static List<BrokerData> brokers() throws Exception {
    List<BrokerData> found =
        new ArrayList<>(admin.examineBrokerClusterInfo().getBrokerAddrTable().values());
    if (found.isEmpty()) throw new IllegalStateException("no broker is registered yet");
    return found;
  }

  private static String produce(String subject, int size, int count) throws Exception {
    byte[][] bodies = new byte[Math.min(BODIES, count)][size];
    Random source = new Random(7);
    for (byte[] body : bodies) source.nextBytes(body);
    DefaultMQProducer producer = producer();
    producer.fetchPublishMessageQueues(subject);
    AtomicInteger next = new AtomicInteger();
    Work work =
        () -> {
          int first;
          while ((first = next.getAndAdd(BATCH)) < count) {
            List<Message> batch = new ArrayList<>();
            for (int i = first; i < Math.min(count, first + BATCH); i++) {
              batch.add(new Message(subject, bodies[i % bodies.length]));
            }
            accepted(producer.send(batch));
          }
        };
    double startedS = nowS();
    ExecutorService pool = Executors.newFixedThreadPool(SENDERS);
    List<Future<?>> sent = new ArrayList<>();
    for (int i = 0; i < SENDERS; i++) {
      sent.add(
          pool.submit(
              () -> {
                work.run();
                return null;
              }));
    }
    for (Future<?> one : sent) one.get();
    double endedS = nowS();
    pool.shutdown();
    ENDING.add(producer::shutdown);
    return list(startedS, endedS);
  }

  private static String consume(String subject, int size, int count) throws Exception {
    AtomicLong got = new AtomicLong();
    AtomicLong wrong = new AtomicLong();
    AtomicReference<Double> firstS = new AtomicReference<>();
    CountDownLatch done = new CountDownLatch(1);
    DefaultMQPushConsumer consumer = consumer(subject, 4, LISTENED_AT_ONCE, messages -> {
      firstS.compareAndSet(null, nowS());
      for (MessageExt message : messages) if (message.getBody().length != size) wrong.incrementAndGet();
      if (got.addAndGet(messages.size()) >= count) done.countDown();
    });
    out.println("\"begins\"");
    done.await();
    double endedS = nowS();
    ENDING.add(consumer::shutdown);
    if (wrong.get() > 0) throw new IllegalStateException(wrong.get() + " of another length");
    return list(firstS.get(), endedS);
  }

  private static String receive(String subject, int count) throws Exception {
    ConcurrentLinkedQueue<Double> ages = new ConcurrentLinkedQueue<>();
    CountDownLatch done = new CountDownLatch(count);
    CountDownLatch attached = new CountDownLatch(QUEUES);
    DefaultMQProducer producer = producer();
    // One in each queue: a consumer that has seen them all sees what follows at once.
    for (int i = 0; i < QUEUES; i++) accepted(producer.send(new Message(subject, PROBE)));
    DefaultMQPushConsumer consumer = consumer(subject, 2, 1, messages -> {
      for (MessageExt message : messages) {
        if (Arrays.equals(message.getBody(), PROBE)) {
          attached.countDown();
        } else {
          ages.add(ageMs(message.getBody()));
          done.countDown();
        }
      }
    });
    attached.await();
    out.println("\"begins\"");
    done.await();
    ENDING.add(consumer::shutdown);
    ENDING.add(producer::shutdown);
    return list(ages.stream().mapToDouble(age -> age).toArray());
  }

  private static String lone(String subject, int size, int count) throws Exception {
    DefaultMQProducer producer = producer();
    double[] timesMs = new double[count];
    for (int i = -FIRST_SENDS; i < count; i++) {
      long started = System.nanoTime();
      accepted(producer.send(new Message(subject, stamped(size))));
      if (i >= 0) timesMs[i] = (System.nanoTime() - started) / 1e6;
    }
    ENDING.add(producer::shutdown);
    return list(timesMs);
  }

  private static String pace(String subject, int size, int count, int perS) throws Exception {
    DefaultMQProducer producer = producer();
    producer.fetchPublishMessageQueues(subject);
    CountDownLatch answered = new CountDownLatch(count);
    AtomicReference<Throwable> failed = new AtomicReference<>();
    double startedS = nowS();
    for (int i = 0; i < count; i++) {
      double untilS = startedS + (double) i / perS - nowS();
      if (untilS > 0) TimeUnit.NANOSECONDS.sleep((long) (untilS * 1e9));
      producer.send(
          new Message(subject, stamped(size)),
          new SendCallback() {
            public void onSuccess(SendResult result) {
              answered.countDown();
            }

            public void onException(Throwable error) {
              failed.set(error);
              answered.countDown();
            }
          });
    }
    answered.await();
    if (failed.get() != null) throw new IllegalStateException(failed.get());
    double endedS = nowS();
    ENDING.add(producer::shutdown);
    return String.format(Locale.ROOT, "%.6f", endedS - startedS);
  }

  interface Listener {
    void take(List<MessageExt> messages);
  }

  /** A push consumer that has been given its queues: until then it sees nothing, for up to 20 s. */
  private static DefaultMQPushConsumer consumer(
      String subject, int threads, int batch, Listener listener) throws Exception {
    DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(subject + GROUP);
    consumer.setNamesrvAddr(nameServer);
    consumer.setInstanceName("consumer" + NAMES.incrementAndGet());
    consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
    consumer.setPullBatchSize(1000);
    consumer.setConsumeMessageBatchMaxSize(batch);
    consumer.setPullThresholdForQueue(20000);
    consumer.setPullThresholdSizeForQueue(256);
    consumer.setConsumeThreadMin(threads);
    consumer.setConsumeThreadMax(threads);
    consumer.subscribe(subject, "*");
    consumer.registerMessageListener(
        (MessageListenerConcurrently)
            (messages, context) -> {
              listener.take(messages);
              return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
            });
    consumer.start();
    while (consumer.getDefaultMQPushConsumerImpl().getRebalanceImpl().getProcessQueueTable().isEmpty()) {
      Thread.sleep(1);
    }
    return consumer;
  }

  private static DefaultMQProducer producer() throws Exception {
    DefaultMQProducer producer = new DefaultMQProducer("producer" + NAMES.incrementAndGet());
    producer.setNamesrvAddr(nameServer);
    producer.setInstanceName("producer" + NAMES.incrementAndGet());
    producer.setSendMsgTimeout(15000);
    producer.start();
    return producer;
  }

  private static void accepted(SendResult result) {
    if (result.getSendStatus() != SendStatus.SEND_OK) throw new IllegalStateException(result.toString());
  }

  /** A body that says when it was made, by the clock that all processes of a machine share. */
  private static byte[] stamped(int size) {
    byte[] body = new byte[size];
    long now = System.nanoTime();
    for (int i = 0; i < 8; i++) body[i] = (byte) (now >>> (56 - 8 * i));
    return body;
  }

  private static double ageMs(byte[] body) {
    long made = 0;
    for (int i = 0; i < 8; i++) made = made << 8 | (body[i] & 0xff);
    return (System.nanoTime() - made) / 1e6;
  }

  private static double nowS() {
    return System.nanoTime() / 1e9;
  }

  private static int number(String word) {
    return Integer.parseInt(word);
  }

  private static String list(double... values) {
    StringBuilder words = new StringBuilder("[");
    for (double value : values) {
      if (words.length() > 1) words.append(", ");
      words.append(String.format(Locale.ROOT, "%.6f", value));
    }
    return words.append("]").toString();
  }
}
